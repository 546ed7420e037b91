// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "channel.h"
#include "kernels.h"

namespace sm120 {
namespace {

constexpr uint32_t kSmallRows = 64;  // up to here a call uses at most kSmallCtas
constexpr uint32_t kSmallCtas = 16;
constexpr uint32_t kLargeCtas = 32;
// Four tiles of 16 bytes per thread of a flat kernel; 64 fp32 tiles of a row in a general one.
constexpr int kMostShared = 64 << 10;
// Below this many bytes a mailbox call is latency: a first look at one vector would only cost its
// round trip.
constexpr uint64_t kScoutBytes = 64 << 10;

// Device memory of a channel: CtaState, then the claim, then the relay's tickets.
constexpr size_t kClaimAt = sizeof(CtaState) * kMaxCtas;
constexpr size_t kTicketsAt = kClaimAt + 128;
constexpr size_t kPrivateBytes = kTicketsAt + sizeof(uint64_t) * kMaxCtas;

uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }

Output output_of(const Call& call) {
  return call.op == Op::kAllReduce    ? Output::kSum
         : call.quant == Quant::kNone ? Output::kNorm
                                      : Output::kFp8;
}

uint32_t cta_limit(const Shape& shape, bool crowded) {
  return shape.rows <= kSmallRows || crowded ? kSmallCtas : kLargeCtas;
}

void launch_kernel(const void* kernel, uint32_t ctas, uint32_t threads, uint32_t shared,
                   uint32_t cluster, bool pdl, void** arguments, cudaStream_t stream) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(ctas);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  unsigned n = 0;
  if (cluster > 1) {
    attributes[n].id = cudaLaunchAttributeClusterDimension;
    attributes[n].val.clusterDim.x = cluster;
    attributes[n].val.clusterDim.y = 1;
    attributes[n++].val.clusterDim.z = 1;
  }
  if (pdl) {
    attributes[n].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[n++].val.programmaticStreamSerializationAllowed = 1;
  }
  config.attrs = attributes;
  config.numAttrs = n;
  if (shared > 40 * 1024) {  // with the kernel's own, above the default of 48 KiB
    // Always the same limit: a smaller one, set by a later call, might not fit a launch that was
    // captured before.
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMostShared),
          "raise the shared memory limit");
  }
  check(cudaLaunchKernelExC(&config, kernel, arguments), "launch");
}

}  // namespace

void fail(cudaError_t error, const std::string& what) {
  throw std::runtime_error(what + ": " + cudaGetErrorName(error) + " (" +
                           cudaGetErrorString(error) + ")");
}

Geometry choose(const Shape& shape, bool norm, bool clusters, bool crowded) {
  const uint32_t tiles = shape.tiles_per_row;
  const uint32_t limit = cta_limit(shape, crowded);
  // Two CTAs of half the threads fit where one of all of them does.
  const uint32_t most_warps = (crowded ? kMaxThreads / 2 : kMaxThreads) / 32;
  Geometry g{1, 0, 1, 0};
  // Few rows: spread each over a cluster until the CTAs are used up or a CTA holds three tiles.
  const uint32_t most = clusters || !norm ? 8u : 1u;
  while (g.cluster < most && g.cluster * 2 * shape.rows <= limit && tiles >= g.cluster * 6) {
    g.cluster *= 2;
  }
  // CTAs that join a row hold one tile per warp.
  if (norm && ceil_div(tiles, g.cluster) > most_warps) g.cluster = 1;
  // Many rows: several in a CTA, as long as a warp can hold its share of each.
  while (g.rows_per_cta < 4 && g.cluster == 1 && shape.rows > limit * g.rows_per_cta &&
         tiles <= most_warps / (2 * g.rows_per_cta) * kMostUnits) {
    g.rows_per_cta *= 2;
  }
  const uint32_t warps = most_warps / g.rows_per_cta;
  const uint32_t share = ceil_div(tiles, g.cluster);
  g.group_warps = ceil_div(share, ceil_div(share, warps));
  g.ctas = std::min(ceil_div(shape.rows, g.rows_per_cta) * g.cluster, limit);
  return g;
}

Channel::Channel(const ChannelConfig& config, void* const* slabs)
    : config_(config), layout_(make_layout(config.topology, config.capacity, config.small)) {
  if (config.relay) relay_ = make_relay_layout(config.capacity);
  if (layout_.slab_bytes + relay_.bytes >= uint64_t{1} << 32)
    throw std::invalid_argument("a slab must be below 4 GiB");
  check(cudaGetDevice(&device_), "cudaGetDevice");
  int major = 0;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_),
        "compute capability");
  clusters_ = major >= 9;
  check(cudaMalloc(reinterpret_cast<void**>(&private_), kPrivateBytes), "allocate counters");
  check(
      cudaHostAlloc(reinterpret_cast<void**>(&flight_), sizeof(FlightRecord), cudaHostAllocMapped),
      "allocate the flight record");
  check(cudaHostGetDevicePointer(reinterpret_cast<void**>(&flight_device_), flight_, 0),
        "map the flight record");
  base_.state = reinterpret_cast<CtaState*>(private_);
  base_.claim = reinterpret_cast<uint32_t*>(private_ + kClaimAt);
  base_.flight = flight_device_;
  for (uint32_t r = 0; r < config.topology.world; ++r) base_.peer[r] = static_cast<char*>(slabs[r]);
  set_timeout_ms(config.timeout_ms);
  base_.slot0 = static_cast<uint32_t>(layout_.slot(0));
  base_.slot_bytes = static_cast<uint32_t>(layout_.slot_bytes);
  base_.cross_offset = static_cast<uint32_t>(layout_.offset[static_cast<int>(Region::kCross)]);
  base_.gather_offset = static_cast<uint32_t>(layout_.offset[static_cast<int>(Region::kGather)]);
  base_.world = config.topology.world;
  base_.rank = config.rank;
  base_.channel = config.id;
  base_.tail_fence = config.host_memory;
  reset();
}

Channel::~Channel() {
  // Errors are left alone: the context may be gone when a process ends.
  cudaFree(private_);
  cudaFreeHost(flight_);
}

void Channel::reset() {
  check(cudaDeviceSynchronize(), "wait for the device");
  char* slab = base_.peer[config_.rank];
  check(cudaMemset(slab + kControlBytes, kClearByte,
                   layout_.slab_bytes + relay_.bytes - kControlBytes),
        "clear the slab");
  check(cudaMemset(slab, 0, kControlBytes), "clear the control page");
  check(cudaMemset(slab + offsetof(ControlPage, record), kClearByte, sizeof(ControlPage::record)),
        "clear the call records");
  check(cudaMemset(private_, 0, kPrivateBytes), "clear the counters");
  std::memset(flight_, 0, sizeof(FlightRecord));
  check(cudaDeviceSynchronize(), "wait for the device");
}

void Channel::read_records(uint32_t slot, CallRecord (&records)[kMaxWorld]) const {
  // A stream of its own: the default one would wait for, or break, a capture under way.
  cudaStream_t stream;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "create a stream");
  const char* from = base_.peer[config_.rank] + offsetof(ControlPage, record) +
                     slot % kSlots * kMaxWorld * sizeof(CallRecord);
  cudaError_t error = cudaMemcpyAsync(records, from, sizeof records, cudaMemcpyDefault, stream);
  if (error == cudaSuccess) error = cudaStreamSynchronize(stream);
  cudaStreamDestroy(stream);
  check(error, "read the call records");
}

bool Channel::admits(Schedule schedule, Dtype dtype, const Shape& shape, bool int8) const {
  const bool possible = shape.rows > 0 && shape.hidden > 0 && shape.hidden % kHiddenUnit == 0 &&
                        shape.tiles_per_row <= 64;
  if (is_relay(schedule)) {
    return possible && config_.relay && !int8 &&
           relay_fits(layout_.capacity, config_.topology, dtype, shape);
  }
  const Plan plan{config_.topology, schedule, dtype, int8 ? Codec::kInt8 : lossless(dtype),
                  lossless(dtype),  0};
  return possible && fits(layout_, plan, shape);
}

void Channel::launch(const Call& call, Geometry geometry, cudaStream_t stream) {
  // It would overwrite what peers wait for: better no call at all, alike on every rank.
  if (!admits(call.schedule, call.dtype, call.shape, call.int8)) {
    throw std::invalid_argument("rank " + std::to_string(config_.rank) + ": a call of " +
                                std::to_string(call.shape.rows) + " x " +
                                std::to_string(call.shape.hidden) +
                                " does not fit the slab; ask admits() before the call");
  }
  const Codec plain = lossless(call.dtype);
  const Codec codec = call.int8 ? Codec::kInt8 : plain;
  const Codec partial = call.fp32_partial ? Codec::kF32 : codec;
  const bool norm = call.op != Op::kAllReduce;
  const bool two_shot = call.schedule != Schedule::kOneShot;
  const bool island = config_.topology.islands > 1;

  Params p = base_;
  p.x = static_cast<const char*>(call.x);
  p.residual = static_cast<const char*>(call.residual);
  p.weight = static_cast<const char*>(call.weight);
  p.out = static_cast<char*>(call.out);
  p.residual_out = static_cast<char*>(call.residual_out);
  p.scale = call.scale;
  p.rows = call.shape.rows;
  p.hidden = call.shape.hidden;
  p.tiles_per_row = call.shape.tiles_per_row;
  p.eps = call.eps;
  p.inverse_hidden = 1.0f / static_cast<float>(call.shape.hidden);
  p.op = static_cast<uint8_t>(call.op);
  p.dtype = static_cast<uint8_t>(call.dtype);
  p.quant = call.quant;
  p.gemma = call.gemma;
  p.weight_f32 = call.weight_f32;
  p.codec = static_cast<uint8_t>(codec);
  p.partial = static_cast<uint8_t>(partial);
  p.early = call.pdl;
  p.scout = config_.host_memory &&
            static_cast<uint64_t>(call.shape.rows) * call.shape.hidden * dtype_bytes(call.dtype) >
                kScoutBytes;
  p.ahead = ahead_;
  p.ahead_count = ahead_count_;

  if (is_relay(call.schedule)) {
    launch_relay(call, p, geometry, stream);
    set_ahead(nullptr, 0, 0);
    return;
  }

  // One island and 16-bit data that travels as it is may have a flat kernel.
  const void* kernel = nullptr;
  if (!island && !call.int8 && !call.weight_f32) {
    const Geometry g =
        geometry.ctas != 0 ? geometry : choose(call.shape, norm, clusters_, crowded_);
    const uint32_t units = ceil_div(call.shape.tiles_per_row, g.cluster * g.group_warps);
    kernel = flat(call.dtype, output_of(call), two_shot, config_.topology.world, units);
    if (kernel != nullptr) geometry = g;
  }
  if (kernel == nullptr) {
    geometry = Geometry{1, 0, 1, std::min(call.shape.rows, cta_limit(call.shape, crowded_))};
  }
  const Plan plan{config_.topology, call.schedule,
                  call.dtype,       codec,
                  partial,          static_cast<uint16_t>(geometry.ctas)};
  const View view = make_view(plan, static_cast<int>(config_.rank));
  const uint32_t tiles = call.shape.tiles();
  p.plan_hash = plan_hash(plan);
  const uint32_t stride = wire_stride(codec) / 16, cross = wire_stride(partial) / 16;
  p.touched_reduce = view.extent(Region::kReduce, tiles) * stride;
  p.touched_cross = view.extent(Region::kCross, tiles) * cross;
  p.touched_gather = view.extent(Region::kGather, tiles) * stride;
  // A flat kernel that finds as many bytes as its own clears 16-bit tiles. Others lie otherwise, so
  // all of them is to be cleared: said by the cross region, unused with one island.
  if (!island && stride * 16 != wire_stride(Codec::kBf16)) p.touched_cross = 1;
  p.ctas = geometry.ctas;
  if (kernel != nullptr) {
    launch_flat(kernel, call, p, geometry, stream);
  } else {
    launch_general(call, p, view, geometry, stream);
  }
  set_ahead(nullptr, 0, 0);
}

void Channel::launch_flat(const void* kernel, const Call& call, Params& p, Geometry g,
                          cudaStream_t stream) {
  const bool norm = call.op != Op::kAllReduce;
  const uint32_t units = ceil_div(p.tiles_per_row, g.cluster * g.group_warps);
  const uint32_t threads = g.group_warps * g.rows_per_cta * 32;
  p.group_warps = g.group_warps;
  p.rows_per_cta = g.rows_per_cta;
  while (1u << p.cluster_log2 < g.cluster) ++p.cluster_log2;
  p.units = units;
  p.row_stride = g.ctas / g.cluster * g.rows_per_cta;
  // Rows that a warp takes in turn leave copies of the sums it owns in its own inbox: the next call
  // must clear them too, which it does with everything when the cross region, unused here, counts
  // as touched.
  if (call.schedule != Schedule::kOneShot && p.row_stride < p.rows) p.touched_cross = 1;
  const bool joined = norm && g.cluster > 1;
  if (threads == 0 || threads > kMaxThreads || g.ctas > kMaxCtas || g.rows_per_cta > 4 ||
      units > kMostUnits || 1u << p.cluster_log2 != g.cluster || g.ctas % g.cluster != 0 ||
      (joined && (units > 1 || g.rows_per_cta != 1 || p.row_stride < p.rows || !clusters_))) {
    throw std::invalid_argument("this geometry does not fit the call");
  }
  const uint32_t shared = units > 2 || (units == 2 && norm && call.quant != Quant::kNone)
                              ? kMostUnits * threads * 16
                              : 0;
  void* arguments[] = {&p};
  const uint32_t more = ceil_div(ahead_ctas_, g.cluster) * g.cluster;
  launch_kernel(kernel, g.ctas + more, threads, shared, joined ? g.cluster : 1,
                call.pdl && clusters_, arguments, stream);
}

void Channel::launch_general(const Call& call, Params& p, const View& view, Geometry g,
                             cudaStream_t stream) {
  const uint32_t warps = std::min(kGeneralThreads / 32, p.tiles_per_row);
  void* arguments[] = {&p, const_cast<View*>(&view)};
  launch_kernel(general(call.dtype, output_of(call)), g.ctas + ahead_ctas_, warps * 32,
                p.tiles_per_row * kTile * 4, 1, call.pdl && clusters_, arguments, stream);
}

void Channel::launch_relay(const Call& call, Params& p, Geometry g, cudaStream_t stream) {
  const uint32_t limit = g.ctas != 0 ? std::min(g.ctas, kMaxCtas) : cta_limit(call.shape, crowded_);
  p.ctas = std::min(call.shape.rows, limit);
  const Codec codec = lossless(call.dtype);
  p.plan_hash = plan_hash(Plan{config_.topology, call.schedule, call.dtype, codec, codec,
                               static_cast<uint16_t>(p.ctas)});
  RelayParams r{};
  r.data = static_cast<uint32_t>(layout_.slab_bytes);
  r.flags = static_cast<uint32_t>(layout_.slab_bytes + relay_.data_bytes);
  r.slot_bytes = static_cast<uint32_t>(relay_.slot_bytes);
  r.share = make_relay_share(call.schedule, p.world, p.rank, p.tiles_per_row);
  r.tickets = reinterpret_cast<uint64_t*>(private_ + kTicketsAt);
  // As few warps as share a row's tiles in as few turns, and the one that signals.
  const uint32_t most = kRelayThreads / 32 - 1;
  const uint32_t workers = ceil_div(p.tiles_per_row, ceil_div(p.tiles_per_row, most));
  void* arguments[] = {&p, &r};
  launch_kernel(relay(call.dtype, output_of(call)), p.ctas + ahead_ctas_, (workers + 1) * 32,
                p.tiles_per_row * kTile * dtype_bytes(call.dtype), 1, call.pdl && clusters_,
                arguments, stream);
}

}  // namespace sm120
