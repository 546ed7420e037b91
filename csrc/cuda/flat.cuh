// SPDX-License-Identifier: Apache-2.0
// The fast kernels: one island, world 2, 4 or 8, 16-bit data. One-shot (push to everyone, everyone
// sums) and two-shot (push to the tile's owner, which sums and pushes the result to everyone).
//
// A row belongs to a group of warps: `group_warps` in each of the 2^cluster_log2 CTAs of a cluster.
// A warp keeps its tiles of the row from the first load to the last store (in registers up to two
// tiles, else in shared memory) and goes its own way from push to poll to sum; only the row's
// statistics join the group.
#pragma once

#include "row.cuh"
#include "wait.cuh"

namespace sm120 {

inline constexpr uint32_t kMaxGroups = 4;  // row groups in a CTA
inline constexpr uint32_t kExitBarrier = 15;

struct FlatShared {
  RowShared row[2][kMaxGroups];  // rows in turn use one half, then the other
};

// kUnits: tiles per warp, 1 or 2; 0 stands for any number.
template <class T, bool kNorm, bool kTwoShot, int kWorld, int kUnits>
struct Flat {
  static constexpr bool kLoop = kUnits == 0;
  // Tiles handled together, and sources polled together when reducing one tile.
  static constexpr int kStep = !kLoop ? kUnits : kTwoShot || kWorld == 2 ? 2 : 1;
  static constexpr int kBatch = kTwoShot ? 1 : kWorld == 2 ? kStep : 1;
  static constexpr int kChunk = kUnits != 1 && kWorld > 4 ? 4 : kWorld;

  const Params& p;
  FlatShared& shared;
  uint4* kept;  // kLoop: [units][threads of the CTA]
  uint32_t lane, group, wrow, first_tile;
  uint32_t slot_offset;
  Trouble note;

  // Warp-uniform: does this warp hold a tile number j? And: does this lane hold elements of it?
  __device__ __forceinline__ bool holds(int j) const {
    return (kUnits == 1 || j < static_cast<int>(p.units)) && first_tile + j < p.tiles_per_row;
  }
  __device__ __forceinline__ uint32_t column(int j) const {
    return (first_tile + j) * kTile + lane * 8;
  }
  __device__ __forceinline__ bool active(int j) const { return holds(j) && column(j) < p.hidden; }
  __device__ __forceinline__ uint64_t element(uint32_t row, int j) const {
    return static_cast<uint64_t>(row) * p.hidden + column(j);
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

  __device__ __forceinline__ void load_x(uint32_t row, int j, uint4 (&y)[kStep]) const {
#pragma unroll
    for (int b = 0; b < kStep; ++b) {
      y[b] = uint4{0, 0, 0, 0};
      if (active(j + b)) y[b] = ptx::ld_stream(p.x + element(row, j + b) * 2);
    }
  }

  __device__ __forceinline__ void scatter(uint32_t row, int j, const uint4 (&y)[kStep]) const {
#pragma unroll
    for (int b = 0; b < kStep; ++b) {
      if (!active(j + b)) continue;
      const uint32_t t = tile(row, j + b);
      const uint4 v = sendable16(y[b]);
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
  __device__ __forceinline__ void clear(const CtaState& state, uint32_t previous) const {
    char* base = p.peer[p.rank] + (p.slot0 + previous * p.slot_bytes);
    const uint32_t threads = gridDim.x * blockDim.x;
    const uint32_t me = blockIdx.x * blockDim.x + threadIdx.x;
    if (state.reduce & kInterleaved) {
      // Sources take turns, 512 bytes each; mine were never written.
      const uint32_t units = (state.reduce & ~kInterleaved) / kWorld * (kWorld - 1);
      for (uint32_t i = me; i < units; i += threads) {
        const uint32_t chunk = i / 32, t = chunk / (kWorld - 1);
        uint32_t source = chunk - t * (kWorld - 1);
        source += source >= p.rank;
        ptx::st_wire(base + ((t * kWorld + source) * kUnit + i % 32 * kVec), all_ones());
      }
    } else {
      clear_units(base, state.reduce, me, threads);
      clear_units(base + p.cross_offset, state.cross, me, threads);
    }
    clear_units(base + p.gather_offset, state.gather, me, threads);
  }

  // Sum kBatch tiles over all ranks: mine is y, the others lie from inbox index `index` on. The
  // rounded sums are left in y.
  __device__ __forceinline__ void reduce(uint32_t index, uint32_t row, int j, uint4* y) {
    float sum[8];
#pragma unroll
    for (int c = 0; c < kWorld; c += kChunk) {
      uint4 v[kBatch * kChunk];
      uint32_t want = 0;
#pragma unroll
      for (int k = 0; k < kBatch * kChunk; ++k) {
        v[k] = y[k / kChunk];
        if (c + k % kChunk != static_cast<int>(p.rank) && active(j + k / kChunk)) want |= 1u << k;
      }
      poll<kBatch * kChunk>(
          p, at(p.rank, (index * kWorld + c) * kUnit + lane * kVec), kUnit, v, want, note,
          [](uint4 w) { return arrived16(w); },
          [&](uint32_t k) {
            return Where{Phase::kReduce, tile(row, j) + k / kChunk, c + k % kChunk};
          });
#pragma unroll
      for (int k = 0; k < kBatch * kChunk; ++k) {
        float f[8];
        unpack8<T>(v[k], f);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum[e] = c + k % kChunk == 0 ? f[e] : sum[e] + f[e];
        if (c + k % kChunk == kWorld - 1) y[k / kChunk] = pack8<T>(sum);
      }
    }
  }

  // Two-shot, first half: sum a tile I own and push the sum. A copy goes to my own inbox when the
  // row does not stay in this warp's hands.
  __device__ __forceinline__ void reduce_owned(uint32_t row, bool single, int j, uint4& y) {
    const uint32_t t = tile(row, j);
    if (!holds(j) || !owns(t)) return;
    reduce(t / kWorld, row, j, &y);
    if (!active(j)) return;
    const uint32_t offset = p.gather_offset + t * kUnit + lane * kVec;
#pragma unroll
    for (int i = 1; i < kWorld; ++i) ptx::st_wire(at((p.rank + i) % kWorld, offset), y);
    if (!single) ptx::st_wire(at(p.rank, offset), y);
  }

  // Two-shot, second half: the tiles that others own.
  __device__ __forceinline__ void collect(uint32_t row, bool single, int j, uint4 (&y)[kStep]) {
    uint32_t want = 0;
    const uint32_t t = tile(row, j);
#pragma unroll
    for (int k = 0; k < kStep; ++k) {
      if (active(j + k) && !(single && owns(t + k))) want |= 1u << k;
    }
    poll<kStep>(
        p, at(p.rank, p.gather_offset + t * kUnit + lane * kVec), kUnit, y, want, note,
        [](uint4 w) { return arrived16(w); },
        [&](uint32_t k) { return Where{Phase::kGather, t + k, (t + k) % kWorld}; });
  }

  // Add the residual to the rounded sum; store and keep the rounded result. Returns its sum of
  // squares.
  __device__ __forceinline__ float add_residual(uint32_t row, int j, uint4 residual, uint4 weight,
                                                uint4& y, float& amax) const {
    float s[8], r[8];
    unpack8<T>(y, s);
    unpack8<T>(residual, r);
#pragma unroll
    for (int e = 0; e < 8; ++e) s[e] += r[e];
    y = pack8<T>(s);
    if (active(j)) *reinterpret_cast<uint4*>(p.residual_out + element(row, j) * 2) = y;
    unpack8<T>(y, s);
    if (p.quant == Quant::kToken) {
      unpack_weight<T>(p, weight, r);
      amax = fmaxf(amax, largest_product(s, r));
    }
    return square_sum(s);
  }

  // Hand a step's sums of squares (and the largest |y * w|) to every warp of the row.
  __device__ __forceinline__ void publish(RowShared& row, int j, float (&squares)[kStep],
                                          float amax) const {
    const float total = warp_sums<kStep>(squares);
    const int mine = j + static_cast<int>(value_of_lane<kStep>(lane));
    if (p.quant == Quant::kToken) amax = warp_max(amax);
    if (lane % (32 / kStep) != 0 || !holds(mine)) return;
    const uint32_t index = first_tile + mine;
#if SM120_HAS_CLUSTER
    if (p.cluster_log2 != 0) {
      const uint32_t bar = ptx::smem_address(&row.barrier);
      for (uint32_t c = 0; c < 1u << p.cluster_log2; ++c) {
        const uint32_t there = ptx::map_to_cta(bar, c);
        ptx::st_async4(ptx::map_to_cta(ptx::smem_address(&row.squares[index]), c), there, total);
        ptx::st_async4(ptx::map_to_cta(ptx::smem_address(&row.amax[index]), c), there, amax);
      }
      return;
    }
#endif
    row.squares[index] = total;
    row.amax[index] = amax;
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

  // Poll, sum, residual and statistics of tiles j .. j + kStep - 1.
  __device__ __forceinline__ void first_pass(uint32_t row, bool single, int j, uint4 (&y)[kStep],
                                             uint4 (&weight)[kStep], RowShared& statistics) {
    uint4 residual[kStep];
    if constexpr (kNorm) {
#pragma unroll
      for (int b = 0; b < kStep; ++b) {
        residual[b] = weight[b] = uint4{0, 0, 0, 0};
        if (active(j + b)) {
          residual[b] = ptx::ld_stream(p.residual + element(row, j + b) * 2);
          if (!kLoop || p.quant == Quant::kToken) {
            weight[b] = ptx::ld_weight(p.weight + column(j + b) * 2);
          }
        }
      }
    }
    if constexpr (kTwoShot) {
      collect(row, single, j, y);
    } else {
#pragma unroll
      for (int b = 0; b < kStep; b += kBatch) {
        if (holds(j + b)) reduce(tile(row, j + b), row, j + b, y + b);
      }
    }
    if constexpr (kNorm) {
      float squares[kStep];
      float amax = 0.0f;
#pragma unroll
      for (int b = 0; b < kStep; ++b) {
        squares[b] = add_residual(row, j + b, residual[b], weight[b], y[b], amax);
      }
#if SM120_HAS_CLUSTER
      if (!kLoop && p.cluster_log2 != 0) ptx::cluster_wait();  // every CTA's barrier is ready
#endif
      publish(statistics, j, squares, amax);
    } else {
#pragma unroll
      for (int b = 0; b < kStep; ++b) {
        if (active(j + b)) *reinterpret_cast<uint4*>(p.out + element(row, j + b) * 2) = y[b];
      }
    }
  }

  __device__ __forceinline__ void second_pass(uint32_t row, const RowShared& statistics,
                                              uint4 (&y)[kStep], uint4 (&weight)[kStep]) const {
    const RowScale scale = row_scale<T>(p, statistics, row, wrow == 0 && lane == 0);
    if constexpr (kLoop) {
      for (int j = 0; holds(j); ++j) {
        if (active(j)) weight[0] = ptx::ld_weight(p.weight + column(j) * 2);
        store_norm<T>(p, row, column(j), active(j), kept_tile(j), weight[0], scale);
      }
    } else {
#pragma unroll
      for (int b = 0; b < kStep; ++b) {
        if (holds(b)) store_norm<T>(p, row, column(b), active(b), y[b], weight[b], scale);
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
    const uint32_t first_row = (blockIdx.x >> p.cluster_log2) * p.rows_per_cta + group;
    const bool single = p.row_stride >= p.rows;
#if SM120_HAS_CLUSTER
    if (kNorm && !kLoop && p.cluster_log2 != 0) {
      if (threadIdx.x == 0) {
        const uint32_t bar = ptx::smem_address(&shared.row[0][0].barrier);
        ptx::mbarrier_init(bar, 1);
        ptx::mbarrier_expect(bar, p.tiles_per_row * 8);
      }
      ptx::cluster_arrive();
    }
#endif
    ptx::wait_previous();
    const CtaState state = load_state(p);
    uint4 y[kStep];
    if (!kLoop && first_row < p.rows) load_x(first_row, 0, y);
    const uint32_t epoch = state.epoch;
    const uint32_t slot = epoch % kSlots;
    const uint32_t previous = slot == 0 ? kSlots - 1 : slot - 1;
    slot_offset = p.slot0 + slot * p.slot_bytes;

    for (uint32_t row = first_row; row < p.rows; row += p.row_stride) {
      if constexpr (kLoop) {
        for (int j = 0; holds(j); j += kStep) {
          load_x(row, j, y);
          scatter(row, j, y);
          if (single) keep(j, y);
        }
      } else {
        if (row != first_row) load_x(row, 0, y);
        scatter(row, 0, y);
      }
    }
    ptx::launch_dependents();
    if (blockIdx.x == 0 && warp == 0) push_record(p, epoch, slot, previous);
    if (warp != 0) ptx::bar_arrive(kExitBarrier, blockDim.x);  // this warp has read the state
    clear(state, previous);

    if constexpr (kTwoShot) {
      for (uint32_t row = first_row; row < p.rows; row += p.row_stride) {
        if constexpr (kLoop) {
          for (int j = 0; holds(j); ++j) {
            if (!owns(tile(row, j))) continue;
            uint4 own = own_tile(row, single, j);
            reduce_owned(row, single, j, own);
            if (single) kept_tile(j) = own;
          }
        } else {
          if (!single) load_x(row, 0, y);
#pragma unroll
          for (int j = 0; j < kStep; ++j) reduce_owned(row, single, j, y[j]);
        }
      }
    }
    uint32_t parity = 0;
    for (uint32_t row = first_row; row < p.rows; row += p.row_stride, parity ^= 1) {
      RowShared& statistics = shared.row[parity][group];
      uint4 weight[kStep];
      if constexpr (kLoop) {
        for (int j = 0; holds(j); j += kStep) {
#pragma unroll
          for (int b = 0; b < kStep; ++b) {
            if (active(j + b)) y[b] = own_tile(row, single, j + b);
          }
          first_pass(row, single, j, y, weight, statistics);
          if constexpr (kNorm) keep(j, y);
        }
      } else {
        if (!kTwoShot && !single) load_x(row, 0, y);
        first_pass(row, single, 0, y, weight, statistics);
      }
      if constexpr (kNorm) {
        join(statistics);
        second_pass(row, statistics, y, weight);
      }
    }
    if (warp == 0) {
      if (blockIdx.x == 0) check_record(p, epoch, slot, note);
      ptx::bar_group(kExitBarrier, blockDim.x);
      if (lane == 0) store_state(p, epoch);
    }
    if (note != 0) report(p, note, epoch);
    if (p.tail_fence) ptx::fence_sys();
  }

  __device__ __forceinline__ void keep(int j, const uint4 (&y)[kStep]) const {
#pragma unroll
    for (int b = 0; b < kStep; ++b) {
      if (active(j + b)) kept_tile(j + b) = y[b];
    }
  }
  __device__ __forceinline__ uint4 own_tile(uint32_t row, bool single, int j) const {
    if (single) return kept_tile(j);
    return active(j) ? ptx::ld_stream(p.x + element(row, j) * 2) : uint4{0, 0, 0, 0};
  }
};

template <class T, bool kNorm, bool kTwoShot, int kWorld, int kUnits>
__global__ void __launch_bounds__(kMaxThreads, 2) flat_kernel(const __grid_constant__ Params p) {
  __shared__ FlatShared shared;
  extern __shared__ uint4 kept[];
  Flat<T, kNorm, kTwoShot, kWorld, kUnits> kernel{p, shared, kept};
  kernel.run();
}

}  // namespace sm120
