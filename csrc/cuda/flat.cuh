// SPDX-License-Identifier: Apache-2.0
// The fast kernels: one island, world 2, 4 or 8, 16-bit data. One-shot (push to everyone, everyone
// sums) and two-shot (push to the tile's owner, which sums and pushes the result to everyone).
//
// A row belongs to a group of warps: `group_warps` in each of the 2^cluster_log2 CTAs of a cluster.
// A warp keeps its tiles of the row from the first load to the last store and goes its own way from
// push to poll to sum; only the row's statistics join the group. The code is written for few
// instructions between the arrival of data and the store that depends on it.
#pragma once

#include "row.cuh"
#include "wait.cuh"

namespace sm120 {

inline constexpr uint32_t kMaxGroups = 4;  // row groups in a CTA
inline constexpr uint32_t kExitBarrier = 15;

struct FlatShared {
  RowShared row[2][kMaxGroups];  // rows in turn use one half, then the other
};

// kUnits: most tiles per warp, 1, 2 or 4. Four wait in shared memory between the steps, two at a
// time.
template <class T, Output kOut, bool kTwoShot, int kWorld, int kUnits>
struct Flat {
  static constexpr bool kNorm = kOut != Output::kSum, kFp8 = kOut == Output::kFp8;
  // Tiles handled together after the sum's data came, tiles polled together when reducing, and
  // sources polled together.
  static constexpr int kStep = kUnits == 1 || kFp8 ? 1 : 2;
  static constexpr int kBatch = !kTwoShot && kWorld == 2 ? kStep : 1;
  static constexpr int kChunk = kWorld > 4 ? 4 : kWorld;

  static constexpr bool kKeep = kUnits > kStep;

  const Params& p;
  FlatShared& shared;
  uint4* kept;  // kKeep: [kUnits][threads of the CTA]
  uint32_t lane, group, wrow, first_tile;
  uint32_t held;    // tiles this warp holds
  uint32_t active;  // bit j: this lane holds elements of tile j
  uint32_t slot_offset;
  Trouble note;

  __device__ __forceinline__ bool has(int j) const { return active >> j & 1u; }
  __device__ __forceinline__ uint32_t column(int j) const {
    return (first_tile + j) * kTile + lane * 8;
  }
  // Byte offset of my eight elements of tile j in a 16-bit tensor.
  __device__ __forceinline__ uint32_t bytes_at(uint32_t row, int j) const {
    return (row * p.hidden + first_tile * kTile + lane * 8) * 2 + j * kUnit;
  }
  __device__ __forceinline__ uint32_t tile(uint32_t row, int j) const {
    return row * p.tiles_per_row + first_tile + j;
  }
  __device__ __forceinline__ bool owns(uint32_t t) const { return t % kWorld == p.rank; }
  __device__ __forceinline__ char* at(uint32_t rank, uint32_t offset) const {
    return p.peer[rank] + (slot_offset + offset);
  }

  __device__ __forceinline__ uint4& kept_tile(int j) const {
    return kept[j * blockDim.x + threadIdx.x];
  }

  __device__ __forceinline__ uint4 load_x(uint32_t row, int j) const {
    return has(j) ? ptx::ld_stream(p.x + bytes_at(row, j)) : uint4{0, 0, 0, 0};
  }
  __device__ __forceinline__ void load_x(uint32_t row, uint4 (&y)[kUnits]) const {
#pragma unroll
    for (int j = 0; j < kUnits; ++j) y[j] = load_x(row, j);
  }

  __device__ __forceinline__ void scatter(uint32_t row, const uint4 (&y)[kUnits]) const {
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
      if (!has(j)) continue;
      const uint32_t t = tile(row, j);
      const uint4 v = sendable16(y[j]);
      if constexpr (kTwoShot) {
        const uint32_t owner = t % kWorld;
        if (owner != p.rank) {
          ptx::st_wire(at(owner, (t / kWorld * kWorld + p.rank) * kUnit + lane * kVec), v);
        }
      } else {
#pragma unroll
        for (int i = 1; i < kWorld; ++i) {
          ptx::st_wire(at((p.rank + i) % kWorld, (t * kWorld + p.rank) * kUnit + lane * kVec), v);
        }
      }
    }
  }

  // Clear what the previous call left in its slot; see layout.h for why now is safe.
  __device__ __forceinline__ void clear(const CtaState& state, uint32_t previous, uint32_t row,
                                        bool single) const {
    char* base = p.peer[p.rank] + (p.slot0 + previous * p.slot_bytes);
    const bool same_size = state.reduce == p.touched_reduce && state.gather == p.touched_gather;
    if (single && same_size && state.cross == 0) {
      // It was of this size: clear where I poll, one slot back. All lanes, whatever its hidden
      // size. A warp without a row has nothing to clear, and its place may lie beyond the slot.
      if (row >= p.rows) return;
      char* mine = base + lane * kVec;
#pragma unroll
      for (int j = 0; j < kUnits; ++j) {
        if (j >= static_cast<int>(held)) break;
        const uint32_t t = tile(row, j);
        const bool mine_to_sum = !kTwoShot || owns(t);
        if (mine_to_sum) {
          char* parts = mine + (kTwoShot ? t / kWorld : t) * (kWorld * kUnit);
#pragma unroll
          for (int s = 0; s < kWorld; ++s) {
            if (s != static_cast<int>(p.rank)) ptx::st_wire(parts + s * kUnit, all_ones());
          }
        } else {
          ptx::st_wire(mine + p.gather_offset + t * kUnit, all_ones());
        }
      }
      return;
    }
    const uint32_t threads = p.ctas * blockDim.x;
    const uint32_t me = blockIdx.x * blockDim.x + threadIdx.x;
    clear_units(base, state.reduce, me, threads);
    clear_units(base + p.cross_offset, state.cross, me, threads);
    clear_units(base + p.gather_offset, state.gather, me, threads);
  }

  // Wait for the last vector of tile j in the K inboxes from `first` on.
  template <int K = 1>
  __device__ __forceinline__ void scout_tile(int j, const char* first, uint32_t stride,
                                             uint32_t want) const {
    const uint32_t lanes = __ballot_sync(~0u, has(j));
    if (lanes != 0) scout<K>(p, first + (31 - __clz(lanes)) * kVec, stride, want, note);
  }

  // Sum kBatch tiles from tile j over all ranks: mine is y, the others lie from inbox index `index`
  // on. The rounded sums are left in y.
  template <class Meanwhile>
  __device__ __forceinline__ void reduce(uint32_t index, uint32_t row, int j, uint4* y,
                                         Meanwhile meanwhile) {
    const auto name = [&](uint32_t k, int c) {
      return Where{Phase::kReduce, tile(row, j) + k / kChunk, c + k % kChunk};
    };
    const auto here = [](uint4 w) { return arrived16(w); };
    if constexpr (kWorld == 2) {
      // The order of two addends does not matter: poll the other's part only.
      const uint32_t other = 1u - p.rank;
      if (p.scout) scout_tile(j, at(p.rank, (index * 2 + other) * kUnit), 0, 1u);
      uint4 v[kBatch];
      poll<kBatch>(
          p, at(p.rank, (index * 2 + other) * kUnit + lane * kVec), 2 * kUnit, v,
          active >> j & ((1u << kBatch) - 1u), note, here,
          [&](uint32_t k) { return Where{Phase::kReduce, tile(row, j) + k, other}; }, meanwhile);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) y[b] = has(j + b) ? add8<T>(y[b], v[b]) : y[b];
    } else {
      float sum[8];
#pragma unroll
      for (int c = 0; c < kWorld; c += kChunk) {
        uint4 v[kChunk];
#pragma unroll
        for (int k = 0; k < kChunk; ++k) v[k] = y[0];
        const uint32_t everyone = ((1u << kChunk) - 1u) & ~(1u << p.rank >> c);
        const uint32_t others = has(j) ? everyone : 0u;
        if (p.scout) {
          scout_tile<kChunk>(j, at(p.rank, (index * kWorld + c) * kUnit), kUnit, everyone);
        }
        const char* from = at(p.rank, (index * kWorld + c) * kUnit + lane * kVec);
        const auto named = [&](uint32_t k) { return name(k, c); };
        if (c == 0) {
          poll<kChunk>(p, from, kUnit, v, others, note, here, named, meanwhile);
        } else {
          poll<kChunk>(p, from, kUnit, v, others, note, here, named);
        }
#pragma unroll
        for (int k = 0; k < kChunk; ++k) {
          float f[8];
          unpack8<T>(v[k], f);
#pragma unroll
          for (int e = 0; e < 8; ++e) sum[e] = c + k == 0 ? f[e] : sum[e] + f[e];
        }
      }
      y[0] = pack8<T>(sum);
    }
  }

  // Two-shot, first half: sum a tile I own and push the sum. A copy goes to my own inbox when the
  // row does not stay in this warp's hands.
  __device__ __forceinline__ void reduce_owned(uint32_t row, bool single, int j, uint4& y) {
    const uint32_t t = tile(row, j);
    reduce(t / kWorld, row, j, &y, Nothing());
    if (!has(j)) return;
    const uint32_t offset = p.gather_offset + t * kUnit + lane * kVec;
#pragma unroll
    for (int i = 1; i < kWorld; ++i) ptx::st_wire(at((p.rank + i) % kWorld, offset), y);
    if (!single) ptx::st_wire(at(p.rank, offset), y);
  }

  // Two-shot, second half: the tiles that others own.
  template <class Meanwhile>
  __device__ __forceinline__ void collect(uint32_t row, bool single, int j, uint4 (&y)[kStep],
                                          Meanwhile meanwhile) {
    uint32_t want = 0;
    const uint32_t t = tile(row, j);
#pragma unroll
    for (int k = 0; k < kStep; ++k) {
      if (has(j + k) && !(single && owns(t + k))) want |= 1u << k;
    }
    // Tiles kept in shared memory leave no registers for it.
    if (!kKeep && p.scout && !(single && owns(t))) {
      scout_tile(j, at(p.rank, p.gather_offset + t * kUnit), 0, 1u);
    }
    poll<kStep>(
        p, at(p.rank, p.gather_offset + t * kUnit + lane * kVec), kUnit, y, want, note,
        [](uint4 w) { return arrived16(w); },
        [&](uint32_t k) { return Where{Phase::kGather, t + k, (t + k) % kWorld}; }, meanwhile);
  }

  // Add the residual to the rounded sum; store and keep the rounded result. Returns its sum of
  // squares.
  __device__ __forceinline__ float add_residual(uint32_t row, int j, uint4 residual, uint4 weight,
                                                uint4& y, float& amax) const {
    float s[8];
    y = add8<T>(y, residual);
    if (has(j)) *reinterpret_cast<uint4*>(p.residual_out + bytes_at(row, j)) = y;
    unpack8<T>(y, s);
    if (kFp8 && p.quant == Quant::kToken) {
      float r[8];
      unpack_weight<T>(p, weight, r);
      amax = fmaxf(amax, largest_product(s, r));
    }
    return square_sum(s);
  }

  // Hand the sums of squares of tiles j .. j + kStep - 1 (and the largest |y * w|) to every warp of
  // the row.
  __device__ __forceinline__ void publish(RowShared& row, int j, float (&squares)[kStep],
                                          float amax) const {
    const float total = warp_sums<kStep>(squares);
    const uint32_t mine = j + value_of_lane<kStep>(lane);
    const uint32_t spare = lane % (32 / kStep);  // lanes that hold the same total
    const uint32_t index = first_tile + mine;
    const bool token = kFp8 && p.quant == Quant::kToken;
    if (token) amax = warp_max(amax);
#if SM120_HAS_CLUSTER
    if (!kKeep && p.cluster_log2 != 0) {
      ptx::cluster_wait();  // every CTA's barrier is ready
      if (spare < 1u << p.cluster_log2 && mine < held) {
        const uint32_t there = ptx::map_to_cta(ptx::smem_address(&row.barrier), spare);
        const uint32_t to = ptx::map_to_cta(ptx::smem_address(&row.squares[index]), spare);
        ptx::st_async4(to, there, total);
        if (token) ptx::st_async4(to + offsetof(RowShared, amax), there, amax);
      }
      return;
    }
#endif
    if (spare == 0 && mine < held) {
      row.squares[index] = total;
      if (token) row.amax[index] = amax;
    }
  }
  __device__ __forceinline__ void join(RowShared& row) const {
#if SM120_HAS_CLUSTER
    if (p.cluster_log2 != 0) {
      ptx::mbarrier_wait(ptx::smem_address(&row.barrier), 0);
      return;
    }
#endif
    ptx::bar_group(1 + group, p.group_warps * 32);
  }

  __device__ __forceinline__ void load_weights(int j, uint4 (&weight)[kStep]) const {
#pragma unroll
    for (int b = 0; b < kStep; ++b) {
      weight[b] = uint4{0, 0, 0, 0};
      if (has(j + b)) weight[b] = ptx::ld_weight(p.weight + column(j + b) * 2);
    }
  }

  // Tiles j .. j + kStep - 1 from their own parts to the rounded sums (none) or residuals (norm).
  template <class Meanwhile>
  __device__ __forceinline__ void step(uint32_t row, bool single, int j, uint4 (&y)[kStep],
                                       uint4 (&weight)[kStep], RowShared& statistics,
                                       Meanwhile meanwhile) {
    uint4 residual[kStep];
    if constexpr (kNorm) {
#pragma unroll
      for (int b = 0; b < kStep; ++b) {
        residual[b] = uint4{0, 0, 0, 0};
        if (has(j + b)) residual[b] = ptx::ld_stream(p.residual + bytes_at(row, j + b));
      }
      if constexpr (kUnits == 1) load_weights(j, weight);
    }
    if constexpr (kTwoShot) {
      collect(row, single, j, y, meanwhile);
    } else {
      reduce(tile(row, j), row, j, y, meanwhile);
#pragma unroll
      for (int b = kBatch; b < kStep; b += kBatch) {
        reduce(tile(row, j + b), row, j + b, y + b, Nothing());
      }
    }
    if constexpr (kNorm) {
      if (kUnits > 1 && kFp8 && p.quant == Quant::kToken) load_weights(j, weight);
      float squares[kStep];
      float amax = 0.0f;
#pragma unroll
      for (int b = 0; b < kStep; ++b) {
        squares[b] = add_residual(row, j + b, residual[b], weight[b], y[b], amax);
      }
      publish(statistics, j, squares, amax);
    } else {
#pragma unroll
      for (int b = 0; b < kStep; ++b) {
        if (has(j + b)) *reinterpret_cast<uint4*>(p.out + bytes_at(row, j + b)) = y[b];
      }
    }
  }

  // One row from its own part (in y, or kept, or still in x) to the outputs.
  template <class Meanwhile>
  __device__ __forceinline__ void finish(uint32_t row, bool single, uint4 (&y)[kUnits],
                                         RowShared& statistics, Meanwhile meanwhile) {
    uint4 weight[kStep];
    if constexpr (kKeep) {
      meanwhile();
#pragma unroll 1
      for (int j = 0; j < kUnits; j += kStep) {
        uint4 part[kStep];
#pragma unroll
        for (int b = 0; b < kStep; ++b) {
          part[b] = single ? kept_tile(j + b) : load_x(row, j + b);
        }
        step(row, single, j, part, weight, statistics, Nothing());
#pragma unroll
        for (int b = 0; kNorm && b < kStep; ++b) kept_tile(j + b) = part[b];
      }
    } else if constexpr (kUnits == 2) {
      meanwhile();
      step(row, single, 0, y, weight, statistics, Nothing());
    } else {
      step(row, single, 0, y, weight, statistics, meanwhile);
    }
    if constexpr (kNorm) {
      // More than one tile leaves no registers for the weights before this.
      uint4 all[kUnits];
#pragma unroll
      for (int j = 0; j < kUnits; ++j) {
        all[j] = kUnits == 1 ? weight[0] : uint4{0, 0, 0, 0};
        if (kUnits > 1 && has(j)) all[j] = ptx::ld_weight(p.weight + column(j) * 2);
      }
      join(statistics);
      const RowScale scale = row_scale<T, kFp8>(p, statistics, row, wrow == 0 && lane == 0);
#pragma unroll
      for (int j = 0; j < kUnits; ++j) {
        store_norm<T, kFp8>(p, row, column(j), has(j), kKeep ? kept_tile(j) : y[j], all[j], scale);
      }
    }
  }

  __device__ __forceinline__ void run() {
    const uint32_t warp = threadIdx.x / 32;
    lane = threadIdx.x % 32;
    note = 0;
    group = warp / p.group_warps;
    const uint32_t crank = blockIdx.x & ((1u << p.cluster_log2) - 1);
    wrow = crank * p.group_warps + warp - group * p.group_warps;
    first_tile = wrow * (kUnits == 1 ? 1 : p.units);
    const uint32_t left = p.tiles_per_row > first_tile ? p.tiles_per_row - first_tile : 0u;
    held = min(left, kUnits == 1 ? 1u : p.units);
    active = 0;
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
      if (j < static_cast<int>(held) && column(j) < p.hidden) active |= 1u << j;
    }
    const uint32_t first_row = (blockIdx.x >> p.cluster_log2) * p.rows_per_cta + group;
    const bool single = p.row_stride >= p.rows;
#if SM120_HAS_CLUSTER
    if (kNorm && p.cluster_log2 != 0) {
      if (threadIdx.x == 0) {
        const uint32_t bar = ptx::smem_address(&shared.row[0][0].barrier);
        ptx::mbarrier_init(bar, 1);
        ptx::mbarrier_expect(bar, p.tiles_per_row * (kFp8 && p.quant == Quant::kToken ? 8 : 4));
      }
      ptx::cluster_arrive();
    }
#endif
    const char* state_at = reinterpret_cast<const char*>(p.state + blockIdx.x);
    const char* x_at = p.x + bytes_at(first_row, 0);
    if (first_row >= p.rows) active = 0;
    ptx::wait_previous(state_at, x_at, active);
    const CtaState state = load_state(state_at);
    uint4 y[kUnits];
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
      y[j] = uint4{0, 0, 0, 0};
      if (has(j)) y[j] = ptx::ld_stream(x_at + j * kUnit);
    }
    if (p.early) ptx::launch_dependents();
    const uint32_t epoch = state.epoch;
    const uint32_t slot = epoch % kSlots;
    const uint32_t previous = slot == 0 ? kSlots - 1 : slot - 1;
    slot_offset = p.slot0 + slot * p.slot_bytes;

#pragma unroll 1
    for (uint32_t row = first_row; row < p.rows; row += p.row_stride) {
      if (row != first_row) load_x(row, y);
      scatter(row, y);
      if (!kTwoShot && p.tail_fence) break;  // the others follow one row ahead of the sums
    }
    if constexpr (kKeep) {
#pragma unroll
      for (int j = 0; j < kUnits; ++j) kept_tile(j) = y[j];
    }
    bool waiting = true;
    const auto meanwhile = [&] {
      if (!waiting) return;
      waiting = false;
      if (!kTwoShot && blockIdx.x == 0 && warp == 0) push_record(p, epoch, slot, previous);
      if (warp != 0) ptx::bar_arrive(kExitBarrier, blockDim.x);  // this warp has read the state
      clear(state, previous, first_row, single);
    };
    if constexpr (kTwoShot) {
      // Before the first wait, so that everyone can see who has begun this call.
      if (blockIdx.x == 0 && warp == 0) push_record(p, epoch, slot, previous);
      meanwhile();
#pragma unroll 1
      for (uint32_t row = first_row; row < p.rows; row += p.row_stride) {
        if constexpr (kKeep) {
#pragma unroll 1
          for (int j = 0; j < static_cast<int>(held); ++j) {
            if (!owns(tile(row, j))) continue;
            uint4 own = single ? kept_tile(j) : load_x(row, j);
            reduce_owned(row, single, j, own);
            kept_tile(j) = own;
          }
        } else {
          if (!single) load_x(row, y);
#pragma unroll
          for (int j = 0; j < kUnits; ++j) {
            if (j < static_cast<int>(held) && owns(tile(row, j)))
              reduce_owned(row, single, j, y[j]);
          }
        }
      }
    }
    uint32_t parity = 0;
#pragma unroll 1
    for (uint32_t row = first_row; row < p.rows; row += p.row_stride, parity ^= 1) {
      if (!kTwoShot && p.tail_fence && row + p.row_stride < p.rows) {
        // Both directions of the link at once: push the next row, then read this one.
        load_x(row + p.row_stride, y);
        scatter(row + p.row_stride, y);
      }
      if (!kKeep && !kTwoShot && !single) load_x(row, y);
      finish(row, single, y, shared.row[parity][group], meanwhile);
    }
    meanwhile();  // a warp without a row
    if (warp == 0) {
      if (blockIdx.x == 0) check_record(p, epoch, slot, glance_record(p, slot), note);
      ptx::bar_group(kExitBarrier, blockDim.x);
      store_state(p, epoch);
    }
    if (note != 0) report(p, note, epoch);
    if (p.tail_fence) ptx::fence_sys();
  }
};

template <class T, Output kOut, bool kTwoShot, int kWorld, int kUnits>
__global__ void __launch_bounds__(kMaxThreads, 1) flat_kernel(const __grid_constant__ Params p) {
  __shared__ FlatShared shared;
  extern __shared__ uint4 kept[];
  if (only_prefetches(p)) return;
  Flat<T, kOut, kTwoShot, kWorld, kUnits> kernel{p, shared, kept};
  kernel.run();
}

}  // namespace sm120
