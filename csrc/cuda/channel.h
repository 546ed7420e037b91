// SPDX-License-Identifier: Apache-2.0
// One rank's channel: the mapped slabs, this rank's private counters, and how a call is launched.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

#include "relay.h"

namespace sm120 {

struct ChannelConfig {
  Topology topology;
  uint32_t rank;
  uint64_t capacity;  // padded bytes of the largest message
  uint64_t small;     // the same for one-shot and island two-hop
  uint64_t timeout_ms;
  uint32_t id;
  bool host_memory;  // slabs are pinned host memory
  bool relay;        // and hold the relay's outboxes, behind the tile slots
};

// What a call asks for; null where it does not apply.
struct Call {
  Op op;
  Dtype dtype;
  Shape shape;
  const void* x;
  const void* residual;
  const void* weight;
  void* out;
  void* residual_out;
  float* scale;
  float eps;
  bool gemma;
  bool weight_f32;
  Quant quant;
  Schedule schedule;
  bool int8;          // quantised wire
  bool fp32_partial;  // islands exchange fp32
  bool pdl;           // programmatic dependent launch
};

// How a row is spread; zero fields are chosen by `choose`.
struct Geometry {
  uint32_t cluster;       // CTAs that share a row: 1, 2, 4 or 8
  uint32_t group_warps;   // warps per row in one CTA
  uint32_t rows_per_cta;  // row groups in a CTA
  uint32_t ctas;
};

class Channel {
 public:
  // `slabs[r]` is rank r's slab as mapped on this device, null where this rank never writes to it.
  // Clears this rank's own slab; no rank may call before every rank has constructed its channel.
  Channel(const ChannelConfig& config, void* const* slabs);
  ~Channel();
  Channel(const Channel&) = delete;
  Channel& operator=(const Channel&) = delete;

  bool admits(Schedule schedule, Dtype dtype, const Shape& shape, bool int8) const;
  void launch(const Call& call, Geometry geometry, cudaStream_t stream);

  // The bound of calls launched from now on; a captured call keeps the bound of its capture.
  void set_timeout_ms(uint64_t timeout_ms) {
    base_.timeout_units =
        static_cast<uint32_t>(std::min<uint64_t>(timeout_ms * 1000000 / 1024, 0x7FFFFFFF));
  }

  // What the next launch asks L2 for, by `ctas` further CTAs. The array must outlive every replay
  // of a graph that captured it.
  void set_ahead(const Ahead* chunks, uint32_t count, uint32_t ctas) {
    ahead_ = chunks;
    ahead_count_ = count;
    ahead_ctas_ = count == 0 ? 0 : ctas;
  }

  // Many ranks share this GPU: use smaller CTAs, since those of all ranks must be resident at once.
  // Alike on every rank.
  void set_crowded(bool crowded) { crowded_ = crowded; }

  const Layout& layout() const { return layout_; }
  // Zero valid field: no failure since the last reset. Reads pinned memory only.
  const FlightRecord& flight() const { return *flight_; }
  // The records that the ranks left for the calls of `slot` (device to host copy).
  void read_records(uint32_t slot, CallRecord (&records)[kMaxWorld]) const;
  // This rank's side of a recovery: clears its slab, counters, flight record. Needs the group's
  // barrier before and after.
  void reset();

 private:
  void launch_flat(const void* kernel, const Call& call, Params& p, Geometry geometry,
                   cudaStream_t stream);
  void launch_general(const Call& call, Params& p, const View& view, Geometry geometry,
                      cudaStream_t stream);
  void launch_relay(const Call& call, Params& p, Geometry geometry, cudaStream_t stream);

  ChannelConfig config_;
  Layout layout_;
  RelayLayout relay_{};
  Params base_{};
  char* private_ = nullptr;  // device memory: states, claim, tickets
  FlightRecord* flight_ = nullptr;
  FlightRecord* flight_device_ = nullptr;
  int device_ = 0;
  bool clusters_ = false;
  bool crowded_ = false;
  const Ahead* ahead_ = nullptr;
  uint32_t ahead_count_ = 0;
  uint32_t ahead_ctas_ = 0;
};

// The spread of a row that the flat kernels use by default: a pure function, equal on every rank.
Geometry choose(const Shape& shape, bool norm, bool clusters, bool crowded);

[[noreturn]] void fail(cudaError_t error, const std::string& what);
inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) fail(error, what);
}

}  // namespace sm120
