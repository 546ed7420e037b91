// SPDX-License-Identifier: Apache-2.0
// The relay of core/relay.h: one island, any world, lossless. A CTA takes whole rows; its last warp
// signals and waits, the others move and sum tiles. While row j is awaited, row j + 1 is written;
// with two-shot, the results of row j - 1 are read after row j was summed.
//
// How a row becomes visible: all warps store it, barrier, the signalling warp's fence, its flag.
// How it is read: an acquiring load of the flag, barrier, all warps load it once.
#pragma once

#include "finish.cuh"
#include "relay.h"
#include "wait.cuh"

namespace sm120 {

struct RelayShared {
  RowShared row[2];  // of alternating rows: two-shot sums a row before it finishes the one before
  uint32_t lost[2];  // a wait for this row's data failed: NaN takes its place
};

template <class T, Output kOut>
struct Relay {
  static constexpr bool kNorm = kOut != Output::kSum, kFp8 = kOut == Output::kFp8;
  static constexpr bool kWide = T::kDtype == Dtype::kF32;
  static constexpr uint32_t kElement = kWide ? 4 : 2;
  static constexpr uint32_t kVectors = kWide ? 2 : 1;
  static constexpr uint32_t kBatch = kWide ? 2 : 4;  // elements of a thread under way, in eights
  static constexpr uint32_t kNoRow = ~0u;

  struct Raw {
    uint4 v[kVectors];
  };

  const Params& p;
  const RelayParams& r;
  RelayShared& shared;
  char* keep;  // [tiles_per_row][256] in the dtype
  uint32_t lane, warp, workers;
  uint32_t data, flags;  // of this call's slot
  uint64_t ticket;
  Trouble note;
  bool ahead;  // this lane has seen the next contribution's flag already

  // --- data ---

  __device__ __forceinline__ Place place(uint32_t row, uint32_t t) const {
    return place_of(p, row, t, lane);
  }
  __device__ __forceinline__ char* outbox(uint32_t rank, uint32_t row, uint32_t t) const {
    return p.peer[rank] + (data + ((row * p.tiles_per_row + t) * kTile + lane * 8) * kElement);
  }
  static __device__ __forceinline__ Raw load(const char* from) {
    Raw raw;
#pragma unroll
    for (uint32_t i = 0; i < kVectors; ++i) raw.v[i] = ptx::ld_wire(from + i * kVec);
    return raw;
  }
  static __device__ __forceinline__ void store(char* to, const Raw& raw) {
#pragma unroll
    for (uint32_t i = 0; i < kVectors; ++i) ptx::st_wire(to + i * kVec, raw.v[i]);
  }
  static __device__ __forceinline__ void unpack(const Raw& raw, float (&f)[8]) {
    if constexpr (kWide) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        f[4 * i] = __uint_as_float(raw.v[i].x), f[4 * i + 1] = __uint_as_float(raw.v[i].y);
        f[4 * i + 2] = __uint_as_float(raw.v[i].z), f[4 * i + 3] = __uint_as_float(raw.v[i].w);
      }
    } else {
      unpack8<T>(raw.v[0], f);
    }
  }
  static __device__ __forceinline__ Raw pack(const float (&f)[8]) {
    Raw raw;
    if constexpr (kWide) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        raw.v[i] = sendable32(uint4{__float_as_uint(f[4 * i]), __float_as_uint(f[4 * i + 1]),
                                    __float_as_uint(f[4 * i + 2]), __float_as_uint(f[4 * i + 3])});
      }
    } else {
      raw.v[0] = pack8<T>(f);
    }
    return raw;
  }

  // --- workers ---

  // Write my contribution to a row: raw, for the sum makes NaNs canonical.
  __device__ __forceinline__ void contribute(uint32_t row) const {
    const uint32_t sends = r.share.sends;
#pragma unroll 1
    for (uint32_t k = warp; k < sends; k += kBatch * workers) {
      Raw raw[kBatch];
#pragma unroll
      for (uint32_t b = 0; b < kBatch; ++b) {
        const uint32_t at = k + b * workers;
        if (at >= sends) continue;
        const Place here = place(row, r.share.send(at));
        if (!here.active) continue;
#pragma unroll
        for (uint32_t i = 0; i < kVectors; ++i) {
          raw[b].v[i] = ptx::ld_stream(p.x + here.element * kElement + i * kVec);
        }
      }
#pragma unroll
      for (uint32_t b = 0; b < kBatch; ++b) {
        const uint32_t at = k + b * workers;
        if (at >= sends) continue;
        const uint32_t t = r.share.send(at);
        if (place(row, t).active) store(outbox(p.rank, row, t), raw[b]);
      }
    }
  }

  // Where a warp keeps the sums of a row between their arrival and `take`: a lane finds its own.
  __device__ __forceinline__ char* kept(uint32_t t) const {
    return keep + (t * kTile + lane * 8) * kElement;
  }
  static __device__ __forceinline__ void put(char* to, const Raw& raw) {
#pragma unroll
    for (uint32_t i = 0; i < kVectors; ++i) reinterpret_cast<uint4*>(to)[i] = raw.v[i];
  }

  // Sum my tiles of a row. The loads of a batch, sources ascending and tile after tile, are under
  // way together.
  __device__ __forceinline__ void sum(uint32_t row, bool lost) {
    const uint32_t sums = r.share.sums;
    uint32_t k = warp, source = 0;   // of the next load
    uint32_t kc = warp, summed = 0;  // of the next addition
    float total[8];
#pragma unroll 1
    while (kc < sums) {
      Raw raw[kBatch];
#pragma unroll
      for (uint32_t b = 0; b < kBatch; ++b) {
        raw[b] = Raw{};
        if (k < sums) {
          const uint32_t t = r.share.sum(k);
          const Place here = place(row, t);
          const char* from =
              source == p.rank ? p.x + here.element * kElement : outbox(source, row, t);
          if (here.active) raw[b] = load(from);
        }
        if (++source == p.world) source = 0, k += workers;
      }
#pragma unroll
      for (uint32_t b = 0; b < kBatch; ++b) {
        float f[8];
        unpack(raw[b], f);
        accumulate(summed == 0, f, total);
        if (++summed < p.world) continue;
        if (kc < sums) {
          const uint32_t t = r.share.sum(kc);
          Raw done = pack(total);
          if (lost) done = lost_data();
          if (r.share.two_shot && place(row, t).active) store(outbox(p.rank, row, t), done);
          put(kept(t), done);
        }
        summed = 0, kc += workers;
      }
    }
  }

  // Read the sums that others made of a row.
  __device__ __forceinline__ void collect(uint32_t row, bool lost) {
    const uint32_t collects = r.share.collects;
#pragma unroll 1
    for (uint32_t k = warp; k < collects; k += kBatch * workers) {
      Raw raw[kBatch];
#pragma unroll
      for (uint32_t b = 0; b < kBatch; ++b) {
        raw[b] = Raw{};
        if (k + b * workers >= collects) continue;
        const uint32_t t = r.share.foreign(k + b * workers);
        if (place(row, t).active) raw[b] = load(outbox(r.share.owner(t), row, t));
      }
#pragma unroll
      for (uint32_t b = 0; b < kBatch; ++b) {
        if (k + b * workers >= collects) continue;
        put(kept(r.share.foreign(k + b * workers)), lost ? lost_data() : raw[b]);
      }
    }
  }
  static __device__ __forceinline__ Raw lost_data() {
    Raw raw;
#pragma unroll
    for (uint32_t i = 0; i < kVectors; ++i) raw.v[i] = kWide ? nan32() : nan16();
    return raw;
  }

  // Rounded sums on their way to the output: those of my own tiles, or of the others'.
  __device__ __forceinline__ void take(uint32_t row, RowShared& stats, bool foreign) {
    const uint32_t count = foreign ? r.share.collects : r.share.sums;
#pragma unroll 1
    for (uint32_t k = warp; k < count; k += workers) {
      const uint32_t t = foreign ? r.share.foreign(k) : r.share.sum(k);
      const Place here = place(row, t);
      Raw raw;
#pragma unroll
      for (uint32_t i = 0; i < kVectors; ++i) raw.v[i] = reinterpret_cast<uint4*>(kept(t))[i];
      if constexpr (kNorm) {
        float f[8];
        unpack(raw, f);
        add_residual<T, kFp8>(p, stats, here, t, lane, f);
      } else if (here.active) {
        put(p.out + here.element * kElement, raw);
      }
    }
  }

  // The norm of a row whose tiles have all been taken. It lies in `residual_out`, in L2.
  __device__ __forceinline__ void finish(uint32_t row, RowShared& stats) {
    if constexpr (kNorm) {
      ptx::bar_group(1, workers * 32);
      const RowScale scale = row_scale<T, kFp8>(p, stats, row, threadIdx.x == 0);
#pragma unroll 1
      for (uint32_t t = warp; t < p.tiles_per_row; t += workers) {
        const Place here = place(row, t);
        float f[8] = {};
        if (here.active) load8<T>(p.residual_out, here.element, f);
        store_normed<T, kFp8>(p, row, here, scale, f);
      }
    }
  }

  // --- the signalling warp ---

  __device__ __forceinline__ char* flag(uint32_t rank, uint32_t row, RelayFlag which) const {
    return p.peer[rank] + (flags + row * kRelayRowFlags +
                           static_cast<uint32_t>(which) * static_cast<uint32_t>(sizeof(uint64_t)));
  }

  // Say that what the CTA stored before the last barrier is there. One fence for both flags; all
  // lanes make it, as it also completes the acquisition of flags seen ahead.
  __device__ __forceinline__ void signal(uint32_t contribution, uint32_t result) const {
    if (contribution == kNoRow && result == kNoRow) return;
    ptx::fence_sys();
    if (lane != 0) return;
    if (contribution != kNoRow) {
      ptx::st_flag(flag(p.rank, contribution, RelayFlag::kContribution), ticket);
    }
    if (result != kNoRow) ptx::st_flag(flag(p.rank, result, RelayFlag::kResult), ticket);
  }

  // Wait until every peer has flagged the contribution to one row and the result of another: lane r
  // and lane 16 + r ask rank r. `next`: the row whose contributions are awaited next.
  __device__ __forceinline__ void await(uint32_t contribution, uint32_t result, uint32_t next) {
    const uint32_t source = lane % kMaxWorld;
    const bool results = lane >= kMaxWorld;
    const uint32_t row = results ? result : contribution;
    const bool listens = talks_to(p, source);
    bool want = listens && row != kNoRow && (results || !ahead);
    const char* from =
        want ? flag(source, row, results ? RelayFlag::kResult : RelayFlag::kContribution) : nullptr;
    ahead = false;
    if (listens && !results && next != kNoRow) {
      ahead = ptx::ld_flag(flag(source, next, RelayFlag::kContribution)) == ticket;
    }
    uint32_t spins = 0;
    uint32_t began = 0;
    while (true) {
      if (want) want = ptx::ld_acquire_flag(from) != ticket;
      const uint32_t missing = __ballot_sync(~0u, want);
      if (missing == 0 || note != 0) return;
      if (++spins % kSpinsPerLook != 0) continue;
      const Abort why = look(p, began);
      if (why == Abort::kNone) continue;
      const uint32_t who = static_cast<uint32_t>(__ffs(missing) - 1);
      note = trouble(
          why, Where{who < kMaxWorld ? Phase::kReduce : Phase::kGather,
                     (who < kMaxWorld ? contribution : result) * p.tiles_per_row, who % kMaxWorld});
      return;
    }
  }

  // --- a call ---
  // Steps of both kinds of warps: one writes row `next`, sums row `next - ctas` and, with two-shot,
  // ends the row before that. They meet once in a one-shot step, twice in a two-shot step.

  __device__ __forceinline__ int32_t after_last_step() const {
    return static_cast<int32_t>(p.rows + (r.share.two_shot ? 2 : 1) * p.ctas);
  }

  __device__ __forceinline__ void work(const CtaState& state, uint32_t previous) {
    const int32_t rows = p.rows, ctas = p.ctas, end = after_last_step();
    uint32_t parity = 1;  // of row `next - ctas`
#pragma unroll 1
    for (int32_t next = blockIdx.x; next < end; next += ctas, parity ^= 1) {
      const int32_t row = next - ctas, last = row - ctas;
      if (next < rows) contribute(next);
      if (row < 0) clear_previous(state, previous);
      if (p.early && next + ctas >= end) ptx::launch_dependents();
      __syncthreads();
      if (row < 0) continue;
      const bool lost = shared.lost[parity] != 0;
      if (row < rows) sum(row, lost);
      if (r.share.two_shot) __syncthreads();  // what `sum` stored is signalled now
      if (row < rows) take(row, shared.row[parity], false);
      if (!r.share.two_shot) {
        finish(row, shared.row[parity]);
      } else if (last >= 0) {
        collect(last, lost);
        take(last, shared.row[parity ^ 1], true);
        finish(last, shared.row[parity ^ 1]);
      }
    }
  }

  // What a call in tiles left in its slot. The signal's fence orders it before all that follows.
  __device__ __forceinline__ void clear_previous(const CtaState& state, uint32_t previous) const {
    char* base = p.peer[p.rank] + (p.slot0 + previous * p.slot_bytes);
    const uint32_t me = (blockIdx.x * workers + warp) * 32 + lane;
    const uint32_t threads = p.ctas * workers * 32;
    clear_units(base, state.reduce, me, threads);
    clear_units(base + p.cross_offset, state.cross, me, threads);
    clear_units(base + p.gather_offset, state.gather, me, threads);
  }

  __device__ __forceinline__ void wait_and_signal(uint32_t epoch, uint32_t slot,
                                                  uint32_t previous) {
    const int32_t rows = p.rows, ctas = p.ctas, end = after_last_step();
    ticket = r.tickets[blockIdx.x] + 1;
    note = 0;
    ahead = false;
    if (blockIdx.x == 0) push_record(p, epoch, slot, previous);
    uint32_t parity = 1;
#pragma unroll 1
    for (int32_t next = blockIdx.x; next < end; next += ctas, parity ^= 1) {
      const int32_t row = next - ctas, last = row - ctas;
      const uint32_t written = next < rows ? next : kNoRow;
      const uint32_t summed = row >= 0 && row < rows ? row : kNoRow;
      await(summed, r.share.two_shot && last >= 0 ? last : kNoRow, written);
      if (lane == 0) shared.lost[parity] = note != 0;
      if (p.early && next + ctas >= end) ptx::launch_dependents();
      __syncthreads();
      if (r.share.two_shot && row >= 0) __syncthreads();
      signal(written, r.share.two_shot ? summed : kNoRow);
    }
    if (blockIdx.x == 0) check_record(p, epoch, slot, glance_record(p, slot), note);
    store_state(p, epoch);
    for (uint32_t c = blockIdx.x + lane * p.ctas; c < kMaxCtas; c += 32 * p.ctas) {
      r.tickets[c] = ticket;
    }
    if (note != 0) report(p, note, epoch);
  }

  __device__ __forceinline__ void run() {
    lane = threadIdx.x % 32;
    warp = threadIdx.x / 32;
    workers = blockDim.x / 32 - 1;
    ptx::wait_previous();
    const CtaState state = load_state(reinterpret_cast<const char*>(p.state + blockIdx.x));
    const uint32_t slot = state.epoch % kSlots, previous = slot == 0 ? kSlots - 1 : slot - 1;
    const uint32_t offset = relay_slot(r.tickets[blockIdx.x] + 1) * r.slot_bytes;
    data = r.data + offset;
    flags = r.flags + offset;
    if (warp == workers) {
      wait_and_signal(state.epoch, slot, previous);
    } else {
      work(state, previous);
    }
  }
};

template <class T, Output kOut>
__global__ void __launch_bounds__(kRelayThreads, 2)
    relay_kernel(const __grid_constant__ Params p, const __grid_constant__ RelayParams r) {
  __shared__ RelayShared shared;
  extern __shared__ uint4 kept[];
  if (only_prefetches(p)) return;
  Relay<T, kOut> kernel{p, r, shared, reinterpret_cast<char*>(kept)};
  kernel.run();
}

}  // namespace sm120
