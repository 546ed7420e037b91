// SPDX-License-Identifier: Apache-2.0
// The CUDA library as tvm-ffi functions. A channel is an integer handle; sglang_sm120.comm.native
// owns it.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include "cuda/channel.h"
#include "cuda/memory.h"
#include "ffi/common.h"

namespace sm120::ffi {
namespace {

using tvm::ffi::Array;
using tvm::ffi::Bytes;
using tvm::ffi::Optional;
using tvm::ffi::String;
using tvm::ffi::TensorView;

Channel& channel_of(int64_t handle) { return *reinterpret_cast<Channel*>(handle); }

int64_t cuda_slab_bytes(int64_t world, String islands, int64_t capacity, int64_t small) {
  const Topology topology = topology_from(world, islands);
  return static_cast<int64_t>(make_layout(topology, capacity, small).slab_bytes);
}

// [bytes from a slab's start to its call records, slots, records per slot, bytes of a record].
Array<int64_t> cuda_record_layout() {
  return {static_cast<int64_t>(offsetof(ControlPage, record)), static_cast<int64_t>(kSlots),
          static_cast<int64_t>(kMaxWorld), static_cast<int64_t>(sizeof(CallRecord))};
}

// What the relay's outboxes add to a slab.
int64_t cuda_relay_bytes(int64_t capacity) {
  return static_cast<int64_t>(make_relay_layout(static_cast<uint64_t>(capacity)).bytes);
}

int64_t cuda_open(int64_t rank, int64_t world, String islands, int64_t capacity, int64_t small,
                  int64_t timeout_ms, int64_t id, bool host_memory, bool relay,
                  Array<int64_t> slabs) {
  ChannelConfig config{};
  config.topology = topology_from(world, islands);
  config.rank = static_cast<uint32_t>(rank);
  config.capacity = static_cast<uint64_t>(capacity);
  config.small = static_cast<uint64_t>(small);
  config.timeout_ms = static_cast<uint64_t>(timeout_ms);
  config.id = static_cast<uint32_t>(id);
  config.host_memory = host_memory;
  config.relay = relay;
  if (static_cast<int64_t>(slabs.size()) != world) {
    TVM_FFI_THROW(ValueError) << "world " << world << " needs as many slabs, not " << slabs.size();
  }
  void* addresses[kMaxWorld] = {};
  for (int64_t r = 0; r < world; ++r)
    addresses[r] = reinterpret_cast<void*>(static_cast<intptr_t>(slabs[r]));
  return reinterpret_cast<int64_t>(new Channel(config, addresses));
}

void cuda_close(int64_t handle) { delete &channel_of(handle); }
void cuda_set_crowded(int64_t handle, bool crowded) { channel_of(handle).set_crowded(crowded); }
void cuda_reset(int64_t handle) { channel_of(handle).reset(); }
void cuda_set_timeout_ms(int64_t handle, int64_t timeout_ms) {
  channel_of(handle).set_timeout_ms(static_cast<uint64_t>(timeout_ms));
}

Shape shape_of(int64_t rows, int64_t hidden) {
  return make_shape(static_cast<uint32_t>(rows), static_cast<uint32_t>(hidden));
}

bool cuda_admits(int64_t handle, int64_t schedule, int64_t dtype, int64_t rows, int64_t hidden,
                 bool int8) {
  if (rows <= 0 || hidden <= 0 || rows >= (int64_t{1} << 24) || hidden > 16384) return false;
  return channel_of(handle).admits(static_cast<Schedule>(schedule), static_cast<Dtype>(dtype),
                                   shape_of(rows, hidden), int8);
}

// `how`: schedule, flags (1 int8, 2 fp32 partials, 4 no programmatic launch), then cluster, group
// warps, rows per CTA and CTAs, zeros for the default.
struct How {
  Schedule schedule;
  bool int8, fp32_partial, pdl;
  Geometry geometry;
};
How how_from(const Array<int64_t>& how) {
  if (how.size() != 6) TVM_FFI_THROW(ValueError) << "how has 6 numbers, not " << how.size();
  How h{};
  h.schedule = static_cast<Schedule>(how[0]);
  h.int8 = how[1] & 1;
  h.fp32_partial = how[1] & 2;
  h.pdl = !(how[1] & 4);
  h.geometry = Geometry{static_cast<uint32_t>(how[2]), static_cast<uint32_t>(how[3]),
                        static_cast<uint32_t>(how[4]), static_cast<uint32_t>(how[5])};
  return h;
}

Call call_of(Op op, const How& how, const TensorView& x, const TensorView& out) {
  const int64_t hidden = x.size(-1);
  Call call{};
  call.op = op;
  call.dtype = dtype_from(x.dtype());
  call.shape = shape_of(hidden == 0 ? 0 : x.numel() / hidden, hidden);
  call.x = data(x);
  call.out = data(out);
  call.schedule = how.schedule;
  call.int8 = how.int8;
  call.fp32_partial = how.fp32_partial;
  call.pdl = how.pdl;
  return call;
}

cudaStream_t stream_of(int64_t stream) { return reinterpret_cast<cudaStream_t>(stream); }

void cuda_all_reduce(int64_t handle, Array<int64_t> how, TensorView x, TensorView out,
                     int64_t stream) {
  const How h = how_from(how);
  channel_of(handle).launch(call_of(Op::kAllReduce, h, x, out), h.geometry, stream_of(stream));
}

// `quant`: 0 none, 1 per token, 2 per group of 128; `scale` is then fp32 [rows] or [rows, hidden /
// 128].
void cuda_all_reduce_rmsnorm(int64_t handle, Array<int64_t> how, TensorView x, TensorView residual,
                             TensorView weight, double eps, bool gemma, TensorView out,
                             TensorView residual_out, int64_t quant, Optional<TensorView> scale,
                             int64_t stream) {
  const How h = how_from(how);
  Call call = call_of(quant == 0 ? Op::kAllReduceRmsNorm : Op::kAllReduceRmsNormFp8, h, x, out);
  call.residual = data(residual);
  call.weight = data(weight);
  call.weight_f32 = dtype_from(weight.dtype()) == Dtype::kF32 && call.dtype != Dtype::kF32;
  call.eps = static_cast<float>(eps);
  call.gemma = gemma;
  call.residual_out = data(residual_out);
  call.quant = static_cast<Quant>(quant);
  if (quant != 0) {
    if (!scale.has_value()) TVM_FFI_THROW(ValueError) << "FP8 output needs a scale tensor";
    call.scale = static_cast<float*>(data(scale.value()));
  }
  channel_of(handle).launch(call, h.geometry, stream_of(stream));
}

// The default spread of a row: cluster, group warps, rows per CTA, CTAs.
Array<int64_t> cuda_geometry(int64_t rows, int64_t hidden, bool norm, bool clusters) {
  const Geometry g = choose(shape_of(rows, hidden), norm, clusters, false);
  return {g.cluster, g.group_warps, g.rows_per_cta, g.ctas};
}

bool cuda_failed(int64_t handle) {
  return *const_cast<const volatile uint32_t*>(&channel_of(handle).flight().valid) != 0;
}

// rank, channel, phase, tile, source, op, dtype, rows, hidden, call, waited ns, why; empty when all
// is well.
Array<int64_t> cuda_flight(int64_t handle) {
  if (!cuda_failed(handle)) return {};
  const FlightRecord& f = channel_of(handle).flight();
  return {f.rank,
          f.channel,
          f.phase,
          f.tile,
          f.source,
          f.op,
          f.dtype,
          f.rows,
          f.hidden,
          static_cast<int64_t>(f.call),
          static_cast<int64_t>(f.waited_ns),
          static_cast<int64_t>(abort_why(f.valid))};
}

// Per rank: epoch, rows, hidden, op, dtype of its call in the slot of call `epoch`; -1 where none
// arrived.
Array<int64_t> cuda_records(int64_t handle, int64_t epoch, int64_t world) {
  CallRecord records[kMaxWorld];
  channel_of(handle).read_records(slot_of(static_cast<uint64_t>(epoch)), records);
  Array<int64_t> out;
  for (int64_t r = 0; r < world; ++r) {
    const CallRecord& c = records[r];
    const bool here = record_arrived(c);
    const auto field = [here](uint32_t value) { return here ? static_cast<int64_t>(value) : -1; };
    out.push_back(field(record_epoch(c)));
    out.push_back(field(record_rows(c)));
    out.push_back(field(record_hidden(c)));
    out.push_back(field(c.kind >> 8));
    out.push_back(field(c.kind & 0xFF));
  }
  return out;
}

Array<int64_t> slab_vmm_allocate(int64_t bytes) {
  int fd = -1;
  const uint64_t address = vmm_allocate(static_cast<uint64_t>(bytes), &fd);
  return {static_cast<int64_t>(address), fd};
}
int64_t slab_vmm_granularity() { return static_cast<int64_t>(vmm_granularity()); }
int64_t slab_vmm_map(int64_t fd, int64_t bytes) {
  return static_cast<int64_t>(vmm_map(static_cast<int>(fd), static_cast<uint64_t>(bytes)));
}
void slab_vmm_release(int64_t address, int64_t bytes) { vmm_release(address, bytes); }

int64_t slab_ipc_allocate(int64_t bytes) {
  std::string unused;
  return static_cast<int64_t>(ipc_allocate(static_cast<uint64_t>(bytes), &unused));
}
Bytes slab_ipc_handle(int64_t address) {
  cudaIpcMemHandle_t h;
  check(cudaIpcGetMemHandle(&h, reinterpret_cast<void*>(static_cast<intptr_t>(address))),
        "cudaIpcGetMemHandle");
  return Bytes(reinterpret_cast<const char*>(&h), sizeof h);
}
int64_t slab_ipc_map(Bytes handle) {
  return static_cast<int64_t>(ipc_map(std::string(handle.data(), handle.size())));
}
void slab_ipc_unmap(int64_t address) { ipc_unmap(address); }
void slab_ipc_release(int64_t address) { ipc_release(address); }
int64_t slab_host_register(int64_t address, int64_t bytes) {
  return static_cast<int64_t>(host_register(address, bytes));
}
void slab_host_unregister(int64_t address) { host_unregister(address); }

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_slab_bytes, cuda_slab_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_record_layout, cuda_record_layout);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_relay_bytes, cuda_relay_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_open, cuda_open);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_close, cuda_close);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_reset, cuda_reset);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_set_crowded, cuda_set_crowded);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_set_timeout_ms, cuda_set_timeout_ms);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_admits, cuda_admits);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_geometry, cuda_geometry);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_all_reduce, cuda_all_reduce);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_all_reduce_rmsnorm, cuda_all_reduce_rmsnorm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_failed, cuda_failed);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_flight, cuda_flight);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_records, cuda_records);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(slab_vmm_granularity, slab_vmm_granularity);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(slab_vmm_allocate, slab_vmm_allocate);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(slab_vmm_map, slab_vmm_map);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(slab_vmm_release, slab_vmm_release);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(slab_ipc_allocate, slab_ipc_allocate);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(slab_ipc_handle, slab_ipc_handle);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(slab_ipc_map, slab_ipc_map);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(slab_ipc_unmap, slab_ipc_unmap);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(slab_ipc_release, slab_ipc_release);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(slab_host_register, slab_host_register);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(slab_host_unregister, slab_host_unregister);

}  // namespace sm120::ffi
