// SPDX-License-Identifier: Apache-2.0
// Bounded, warp-uniform polling. A wait that expires leaves NaN in place of the data and a note in
// a register; at its end the kernel writes the flight record and raises the abort word in every
// slab. It always runs to its end, so the context lives.
#pragma once

#include <cstddef>

#include "params.h"
#include "prefetch.cuh"
#include "wire.cuh"

namespace sm120 {

inline constexpr uint32_t kSpinsPerLook =
    256;  // polls between two looks at the clock and the abort word

// What went wrong in this warp: 0, or why (3 bits) | phase (3) | source (5) | tile (21).
using Trouble = uint32_t;

struct Where {
  Phase phase;
  uint32_t tile;
  uint32_t source;
};

__device__ __forceinline__ Trouble trouble(Abort why, const Where& w) {
  return static_cast<uint32_t>(why) << 29 | static_cast<uint32_t>(w.phase) << 26 | w.source << 21 |
         (w.tile & 0x1FFFFF);
}

// One look at the clock and the abort word; the same answer in every lane. `began` is 0 on the
// first look.
__device__ __forceinline__ Abort look(const Params& p, uint32_t& began) {
  const uint32_t word = ptx::ld_wire4(p.peer[p.rank] + offsetof(ControlPage, abort));
  const uint32_t now = static_cast<uint32_t>(ptx::globaltimer() >> 10) | 1u;
  if (began == 0) began = now;
  const Abort why = word != 0                       ? Abort::kLeft
                    : now - began > p.timeout_units ? Abort::kMissing
                                                    : Abort::kNone;
  return static_cast<Abort>(__shfl_sync(~0u, static_cast<uint32_t>(why), 0));
}

struct Nothing {
  __device__ __forceinline__ void operator()() const {}
};

// Poll K vectors of 16 bytes at base, base + stride, ... until every one in `want` (a bit per item;
// may differ between lanes) has arrived in every lane. `name(k)` says where item k comes from, and
// `meanwhile()` runs once while the first loads are under way.
template <int K, class Arrived, class Name, class Meanwhile = Nothing>
__device__ __forceinline__ void poll(const Params& p, const char* base, uint32_t stride,
                                     uint4 (&v)[K], uint32_t want, Trouble& note, Arrived arrived,
                                     Name name, Meanwhile meanwhile = Meanwhile()) {
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (want >> k & 1u) v[k] = ptx::ld_wire(base + k * stride);
  }
  meanwhile();
  uint32_t spins = 0;
  uint32_t began = 0;
  while (true) {
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if ((want >> k & 1u) && arrived(v[k])) want &= ~(1u << k);
    }
    if (!__any_sync(~0u, want != 0)) return;
    if (++spins % kSpinsPerLook == 0) {
      const Abort why = look(p, began);
      if (note != 0 || why != Abort::kNone) {
        const uint32_t left = __shfl_sync(~0u, want, __ffs(__ballot_sync(~0u, want != 0)) - 1);
        if (note == 0) note = trouble(why, name(static_cast<uint32_t>(__ffs(left) - 1)));
        break;
      }
    }
#pragma unroll
    for (int k = 0; k < K; ++k) {
      if (want >> k & 1u) v[k] = ptx::ld_wire(base + k * stride);
    }
  }
#pragma unroll
  for (int k = 0; k < K; ++k) {
    if (want >> k & 1u) v[k] = nan16();  // 0x7FFF7FFF is a NaN as fp32 too
  }
}

// Through PCIe every look costs link time, so a large call first waits for one vector of each item:
// lane k reads at first + k * stride, for the K items in `want`. Returns when they are there or
// when `poll` would give up.
template <int K>
__device__ __forceinline__ void scout(const Params& p, const char* first, uint32_t stride,
                                      uint32_t want, Trouble note) {
  const uint32_t lane = threadIdx.x & 31;
  bool missing = lane < K && (want >> lane & 1u);
  uint32_t spins = 0;
  uint32_t began = 0;
  while (true) {
    if (missing) missing = !arrived16(ptx::ld_wire(first + lane * stride));
    if (!__any_sync(~0u, missing)) return;
    if (++spins % kSpinsPerLook == 0 && (note != 0 || look(p, began) != Abort::kNone)) return;
  }
}

// The first warp with trouble tells the host, then the peers (unless a peer told us).
static __device__ __noinline__ void report(const Params& p, Trouble note, uint32_t epoch) {
  if ((threadIdx.x & 31) != 0 || atomicExch(p.claim, 1u) != 0) return;
  Abort why = static_cast<Abort>(note >> 29);
  uint32_t source = note >> 21 & 31u;
  if (why == Abort::kLeft) {
    const uint32_t word = ptx::ld_wire4(p.peer[p.rank] + offsetof(ControlPage, abort));
    if (word != 0)
      source = abort_culprit(word) == p.rank ? abort_reporter(word) : abort_culprit(word);
  }
  const uint32_t code = abort_code(why, source, p.rank);
  volatile FlightRecord* f = p.flight;
  f->rank = p.rank;
  f->channel = p.channel;
  f->phase = note >> 26 & 7u;
  f->tile = note & 0x1FFFFF;
  f->source = source;
  f->op = p.op;
  f->dtype = p.dtype;
  f->rows = p.rows;
  f->hidden = p.hidden;
  f->call = epoch;
  f->waited_ns = static_cast<uint64_t>(p.timeout_units) << 10;
  f->valid = code;
  if (why == Abort::kLeft) return;
  for (uint32_t r = 0; r < p.world; ++r) {
    if (p.peer[r] != nullptr) ptx::st_wire4(p.peer[r] + offsetof(ControlPage, abort), code);
  }
}

// --- call records: lane r of one warp talks to rank r
// ------------------------------------------------

__device__ __forceinline__ uint4 my_record(const Params& p, uint32_t epoch) {
  const Shape shape{p.rows, p.hidden, p.tiles_per_row};
  const CallRecord r =
      make_record(epoch, static_cast<Op>(p.op), static_cast<Dtype>(p.dtype), shape, p.plan_hash);
  return uint4{r.epoch_low | static_cast<uint32_t>(r.epoch_high) << 16,
               r.rows_low | static_cast<uint32_t>(r.rows_high) << 16,
               r.hidden | static_cast<uint32_t>(r.kind) << 16, r.plan};
}
__device__ __forceinline__ uint32_t record_offset(uint32_t slot, uint32_t source) {
  return offsetof(ControlPage, record) + (slot * kMaxWorld + source) * sizeof(CallRecord);
}
__device__ __forceinline__ bool talks_to(const Params& p, uint32_t r) {
  return r < p.world && r != p.rank && p.peer[r] != nullptr;
}

// Push my record and clear the previous call's.
__device__ __forceinline__ void push_record(const Params& p, uint32_t epoch, uint32_t slot,
                                            uint32_t previous_slot) {
  const uint32_t lane = threadIdx.x & 31;
  if (!talks_to(p, lane)) return;
  ptx::st_wire(p.peer[lane] + record_offset(slot, p.rank), my_record(p, epoch));
  ptx::st_wire(p.peer[p.rank] + record_offset(previous_slot, lane), all_ones());
}

// Compare the peers' records with mine. `early` is a look that began before the last poll ended.
__device__ __forceinline__ uint4 glance_record(const Params& p, uint32_t slot) {
  const uint32_t lane = threadIdx.x & 31;
  return ptx::ld_wire(p.peer[p.rank] + record_offset(slot, lane % kMaxWorld));
}
__device__ __forceinline__ void check_record(const Params& p, uint32_t epoch, uint32_t slot,
                                             uint4 early, Trouble& note) {
  const uint32_t lane = threadIdx.x & 31;
  const bool listens = talks_to(p, lane);
  uint4 theirs[1] = {early};
  if (__any_sync(~0u, listens && !arrived16(early))) {
    poll<1>(
        p, p.peer[p.rank] + record_offset(slot, lane % kMaxWorld), 0, theirs, listens ? 1u : 0u,
        note, [](uint4 v) { return arrived16(v); },
        [&](uint32_t) { return Where{Phase::kRecord, 0u, 0u}; });
  }
  const uint4 mine = my_record(p, epoch);
  const bool differs = listens && (mine.x != theirs[0].x || mine.y != theirs[0].y ||
                                   mine.z != theirs[0].z || mine.w != theirs[0].w);
  const uint32_t others = __ballot_sync(~0u, differs);
  if (others != 0 && note == 0) {
    note = trouble(Abort::kMismatch,
                   Where{Phase::kRecord, 0u, static_cast<uint32_t>(__ffs(others) - 1)});
  }
}

// --- prefetch: by CTAs of their own; among the warps that poll it delays the sum ---

// True in a CTA that is there for this only.
__device__ __forceinline__ bool only_prefetches(const Params& p) {
  if (blockIdx.x < p.ctas) return false;
  const uint32_t warps = blockDim.x / 32;
  prefetch_ahead(p.ahead, p.ahead_count, (blockIdx.x - p.ctas) * warps + threadIdx.x / 32,
                 (gridDim.x - p.ctas) * warps);
  return true;
}

// --- this CTA's state: read at the start; written at the end, with those of the CTAs this launch
// lacks ---

__device__ __forceinline__ CtaState load_state(const char* at) {
  const uint4 v = ptx::ld_stream(at);
  return CtaState{v.x, v.y, v.z, v.w};
}
// One warp.
__device__ __forceinline__ void store_state(const Params& p, uint32_t epoch) {
  const uint32_t next = epoch + 1 == kEpochWrap ? 0 : epoch + 1;
  for (uint32_t c = blockIdx.x + (threadIdx.x & 31) * p.ctas; c < kMaxCtas; c += 32 * p.ctas) {
    *reinterpret_cast<uint4*>(p.state + c) =
        uint4{next, p.touched_reduce, p.touched_cross, p.touched_gather};
  }
}

}  // namespace sm120
