// SPDX-License-Identifier: Apache-2.0
// Every schedule of core/schedule.h, any world and islands, any dtype and codec. A CTA takes whole
// rows; a warp takes tiles and walks them through scatter, reduce, cross and gather; a lane holds 8
// elements. The row's sums wait in shared memory as fp32.
#pragma once

#include "finish.cuh"
#include "wait.cuh"

namespace sm120 {

// INT8: the four lanes of a block of 32 share its scale. Lanes beyond the tile hold zeros.
struct Int8Block {
  uint2 codes;
  uint32_t scale;
};
__device__ __forceinline__ Int8Block int8_pack(const float (&f)[8]) {
  uint32_t most = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = max(most, __float_as_uint(f[i]) & 0x7FFFFFFFu);
  most = max(most, __shfl_xor_sync(~0u, most, 1));
  most = max(most, __shfl_xor_sync(~0u, most, 2));
  const uint8_t scale = int8_scale(most);
  const bool poison = scale == kInt8Poison;
  const float inverse = poison ? 0.0f : int8_inverse_step(scale);
  uint32_t w[2] = {0, 0};
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t code = poison ? kInt8CodeFlip : int8_encode(f[i], inverse);
    w[i / 4] |= code << (i % 4 * 8);
  }
  return Int8Block{uint2{w[0], w[1]}, scale};
}
__device__ __forceinline__ void int8_unpack(uint2 codes, uint32_t scale, float (&f)[8]) {
  const float step =
      scale == kInt8Poison ? float_of(kNan32) : int8_step(static_cast<uint8_t>(scale));
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t word = i < 4 ? codes.x : codes.y;
    f[i] = int8_decode(static_cast<uint8_t>(word >> (i % 4 * 8)), step);
  }
}

template <class T, Output kOut>
struct General {
  static constexpr bool kNorm = kOut != Output::kSum, kFp8 = kOut == Output::kFp8;
  const Params& p;
  const View& view;
  RowShared& shared;
  float* sums;  // [tiles_per_row][256]
  uint32_t lane, warp;
  uint32_t slot_offset;
  Trouble note;

  __device__ __forceinline__ char* at(uint32_t rank, Region region, uint32_t index,
                                      Codec codec) const {
    const uint32_t offset = region == Region::kReduce  ? 0u
                            : region == Region::kCross ? p.cross_offset
                                                       : p.gather_offset;
    return p.peer[rank] + (slot_offset + offset + index * wire_stride(codec));
  }
  __device__ __forceinline__ Codec codec() const { return static_cast<Codec>(p.codec); }
  __device__ __forceinline__ Codec partial() const { return static_cast<Codec>(p.partial); }

  __device__ __forceinline__ Place place(uint32_t row, uint32_t t) const {
    return place_of(p, row, t, lane);
  }
  __device__ __forceinline__ void load_x(const Place& at, float (&f)[8]) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) f[i] = 0.0f;
    if (at.active) load8<T>(p.x, at.element, f);
  }
  __device__ __forceinline__ float4* kept(uint32_t t) const {
    return reinterpret_cast<float4*>(sums + t * kTile + lane * 8);
  }
  __device__ __forceinline__ void keep(uint32_t t, const float (&f)[8]) const {
    kept(t)[0] = float4{f[0], f[1], f[2], f[3]};
    kept(t)[1] = float4{f[4], f[5], f[6], f[7]};
  }
  __device__ __forceinline__ void recall(uint32_t t, float (&f)[8]) const {
    const float4 a = kept(t)[0], b = kept(t)[1];
    f[0] = a.x, f[1] = a.y, f[2] = a.z, f[3] = a.w, f[4] = b.x, f[5] = b.y, f[6] = b.z, f[7] = b.w;
  }

  // What a receiver of these values decodes.
  __device__ __forceinline__ void through(Codec codec, float (&f)[8]) const {
    if (codec == Codec::kInt8) {
      const Int8Block block = int8_pack(f);
      int8_unpack(block.codes, block.scale, f);
    } else if (codec == Codec::kBf16) {
      round8<Bf16>(f);
    } else if (codec == Codec::kF16) {
      round8<F16>(f);
    }
  }

  // A tile in wire form, in registers.
  struct Packet {
    uint4 a, b;    // b: fp32 only
    uint4 header;  // INT8, lane 0
  };
  __device__ __forceinline__ Packet dress(Codec codec, const float (&f)[8]) const {
    Packet packet{};
    if (codec == Codec::kInt8) {
      const Int8Block block = int8_pack(f);
      packet.a = uint4{block.codes.x, block.codes.y, 0, 0};
      // Lane 0 collects the scales of the eight blocks; a block beyond the tile has the smallest
      // scale.
      uint32_t w[2] = {0, 0};
#pragma unroll
      for (int b = 0; b < 8; ++b) w[b / 4] |= __shfl_sync(~0u, block.scale, b * 4) << (b % 4 * 8);
      packet.header = uint4{w[0], w[1], 0, 0};
    } else if (codec == Codec::kF32) {
      packet.a = sendable32(uint4{__float_as_uint(f[0]), __float_as_uint(f[1]),
                                  __float_as_uint(f[2]), __float_as_uint(f[3])});
      packet.b = sendable32(uint4{__float_as_uint(f[4]), __float_as_uint(f[5]),
                                  __float_as_uint(f[6]), __float_as_uint(f[7])});
    } else {
      packet.a = sendable16(codec == Codec::kBf16 ? pack8<Bf16>(f) : pack8<F16>(f));
    }
    return packet;
  }
  __device__ __forceinline__ void post(Codec codec, char* to, const Packet& packet,
                                       bool active) const {
    if (codec == Codec::kInt8) {
      if (lane == 0) ptx::st_wire(to, packet.header);
      if (active) ptx::st_wire8(to + kInt8Header + lane * 8, uint2{packet.a.x, packet.a.y});
    } else if (active && codec == Codec::kF32) {
      ptx::st_wire(to + lane * 32, packet.a);
      ptx::st_wire(to + lane * 32 + 16, packet.b);
    } else if (active) {
      ptx::st_wire(to + lane * kVec, packet.a);
    }
  }
  __device__ __forceinline__ void push(const Push& to, Codec codec, const Packet& packet,
                                       bool active) const {
    post(codec, at(to.dst, to.region, to.index, codec), packet, active);
  }

  // Poll a tile and decode it. Warp-uniform.
  __device__ __forceinline__ void receive(Codec codec, const char* from, bool active,
                                          const Where& where, float (&f)[8]) {
    // Two vectors: the two halves of fp32, or the INT8 header and the codes of two lanes.
    const bool int8 = codec == Codec::kInt8, f32 = codec == Codec::kF32;
    const bool first = __shfl_sync(~0u, active, lane % 16 * 2);
    const bool second = __shfl_sync(~0u, active, lane % 16 * 2 + 1);
    const uint32_t offset = int8 ? 0 : f32 ? lane * 32 : lane * kVec;
    const uint32_t stride = int8 ? kInt8Header + lane % 16 * 16 : 16;
    uint32_t want = active ? (f32 ? 3u : 1u) : 0u;
    if (int8 && first && lane < 16) want |= 2u;
    uint4 v[2] = {};
    poll<2>(
        p, from + offset, stride, v, want, note,
        [&](uint4 w) {
          if (int8) {
            // The last eight bytes of a header are zero; a lone lane's pair may never come.
            const bool here = sm120::arrived8(w.x) && sm120::arrived8(w.y);
            return here && (!second || (sm120::arrived8(w.z) && sm120::arrived8(w.w)));
          }
          return f32 ? arrived32(w) : arrived16(w);
        },
        [&](uint32_t) { return where; });
    if (int8) {
      const uint32_t x = __shfl_sync(~0u, v[1].x, lane / 2), y = __shfl_sync(~0u, v[1].y, lane / 2);
      const uint32_t z = __shfl_sync(~0u, v[1].z, lane / 2), w = __shfl_sync(~0u, v[1].w, lane / 2);
      uint32_t scale = (lane < 16 ? v[0].x : v[0].y) >> (lane / 4 % 4 * 8) & 0xFFu;
      if (note != 0) scale = kInt8Poison;
      int8_unpack(lane % 2 == 0 ? uint2{x, y} : uint2{z, w}, scale, f);
    } else if (f32) {
      f[0] = __uint_as_float(v[0].x), f[1] = __uint_as_float(v[0].y),
      f[2] = __uint_as_float(v[0].z);
      f[3] = __uint_as_float(v[0].w), f[4] = __uint_as_float(v[1].x),
      f[5] = __uint_as_float(v[1].y);
      f[6] = __uint_as_float(v[1].z), f[7] = __uint_as_float(v[1].w);
    } else if (codec == Codec::kBf16) {
      unpack8<Bf16>(v[0], f);
    } else {
      unpack8<F16>(v[0], f);
    }
    if (!active) {
#pragma unroll
      for (int i = 0; i < 8; ++i) f[i] = 0.0f;
    }
  }

  __device__ __forceinline__ void scatter(uint32_t row, uint32_t t) const {
    const uint32_t tile = row * p.tiles_per_row + t;
    const uint32_t fanout = view.scatter_fanout(tile);
    if (fanout == 0) return;
    float f[8];
    const Place here = place(row, t);
    load_x(here, f);
    const Packet packet = dress(codec(), f);
#pragma unroll 1
    for (uint32_t i = 0; i < fanout; ++i)
      push(view.scatter_push(tile, i), codec(), packet, here.active);
  }

  // The finished sum of a tile: through the wire form that others receive, and to them.
  __device__ __forceinline__ void finish_tile(uint32_t tile, const Place& here, float (&f)[8]) {
    const uint32_t fanout = view.gather_fanout(tile);
    const Packet packet = dress(codec(), f);
#pragma unroll 1
    for (uint32_t i = 0; i < fanout; ++i)
      push(view.gather_push(tile, i), codec(), packet, here.active);
    through(codec(), f);
  }

  __device__ __forceinline__ void reduce(uint32_t row, uint32_t t) {
    const uint32_t tile = row * p.tiles_per_row + t;
    if (!view.reduces(tile)) return;
    const Place here = place(row, t);
    const uint32_t base = view.reduce_base(tile);
    const uint32_t sources = view.sources();
    const bool several = view.topology.islands > 1;
    float part[8], f[8];
    uint32_t island = several && view.flat ? 0u : view.island;
    bool first_island = true, first = true;
#pragma unroll 1
    for (uint32_t i = 0; i < sources; ++i) {
      const uint32_t source = view.source_rank(i);
      if (i == view.source) {
        load_x(here, f);
        if (codec() == Codec::kInt8) through(codec(), f);
      } else {
        receive(codec(), at(p.rank, Region::kReduce, base + i, codec()), here.active,
                Where{Phase::kReduce, tile, source}, f);
      }
      accumulate(first, f, part);
      first = false;
      const bool island_ends =
          i + 1 == sources || (view.flat && i + 1 == view.topology.begin[island + 1]);
      if (!island_ends) continue;
      if (several) through(partial(), part);
      if (!first_island) {  // the total waits in shared memory
        recall(t, f);
        accumulate(false, part, f);
        keep(t, f);
      } else {
        keep(t, part);
      }
      first_island = false;
      first = true;
      ++island;
    }
    recall(t, part);
    if (view.cross) {
      const Packet packet = dress(partial(), part);
#pragma unroll 1
      for (uint32_t i = 0; i < view.cross_fanout(tile); ++i) {
        push(view.cross_push(tile, i), partial(), packet, here.active);
      }
    } else {
      finish_tile(tile, here, part);
      keep(t, part);
    }
  }

  __device__ __forceinline__ void cross(uint32_t row, uint32_t t) {
    const uint32_t tile = row * p.tiles_per_row + t;
    if (!view.adds_partials(tile)) return;
    const Place here = place(row, t);
    const uint32_t base = view.cross_base(tile);
    float total[8], f[8];
#pragma unroll 1
    for (uint32_t from = 0; from < view.topology.islands; ++from) {
      if (view.polls_partial(tile, from)) {
        receive(partial(), at(p.rank, Region::kCross, base + from, partial()), here.active,
                Where{Phase::kCross, tile, view.partial_sender(tile, from)}, f);
        if (view.ring_forwards(from)) {
          push(view.ring_push(tile, from), partial(), dress(partial(), f), here.active);
        }
      } else {
        recall(t, f);
      }
      accumulate(from == 0, f, total);
    }
    finish_tile(tile, here, total);
    keep(t, total);
  }

  __device__ __forceinline__ void collect(uint32_t row, uint32_t t) {
    const uint32_t tile = row * p.tiles_per_row + t;
    if (!view.polls_result(tile)) return;
    float f[8];
    receive(codec(), at(p.rank, Region::kGather, tile, codec()), place(row, t).active,
            Where{Phase::kGather, tile, view.owner(tile)}, f);
    keep(t, f);
  }

  // The kept sum becomes the row before the norm.
  __device__ __forceinline__ void add_residual(uint32_t row, uint32_t t) const {
    const Place here = place(row, t);
    float f[8];
    recall(t, f);
    sm120::add_residual<T, kFp8>(p, shared, here, t, lane, f);
    if (here.active) keep(t, f);
  }

  __device__ __forceinline__ void norm(uint32_t row, uint32_t t, const RowScale& scale) const {
    float f[8];
    recall(t, f);
    store_normed<T, kFp8>(p, row, place(row, t), scale, f);
  }

  __device__ __forceinline__ void run() {
    lane = threadIdx.x % 32;
    warp = threadIdx.x / 32;
    note = 0;
    ptx::wait_previous();
    const CtaState state = load_state(reinterpret_cast<const char*>(p.state + blockIdx.x));
    const uint32_t epoch = state.epoch;
    const uint32_t slot = epoch % kSlots;
    const uint32_t previous = slot == 0 ? kSlots - 1 : slot - 1;
    slot_offset = p.slot0 + slot * p.slot_bytes;

#pragma unroll 1
    for (uint32_t row = blockIdx.x; row < p.rows; row += p.ctas) {
#pragma unroll 1
      for (uint32_t t = warp; t < p.tiles_per_row; t += blockDim.x / 32) scatter(row, t);
    }
    if (p.early) ptx::launch_dependents();
    if (blockIdx.x == 0 && warp == 0) push_record(p, epoch, slot, previous);
    {
      char* base = p.peer[p.rank] + (p.slot0 + previous * p.slot_bytes);
      const uint32_t me = blockIdx.x * blockDim.x + threadIdx.x, threads = p.ctas * blockDim.x;
      clear_units(base, state.reduce, me, threads);
      clear_units(base + p.cross_offset, state.cross, me, threads);
      clear_units(base + p.gather_offset, state.gather, me, threads);
    }
#pragma unroll 1
    for (uint32_t row = blockIdx.x; row < p.rows; row += p.ctas) {
#pragma unroll 1
      for (uint32_t t = warp; t < p.tiles_per_row; t += blockDim.x / 32) reduce(row, t);
#pragma unroll 1
      for (uint32_t t = warp; t < p.tiles_per_row; t += blockDim.x / 32) cross(row, t);
#pragma unroll 1
      for (uint32_t t = warp; t < p.tiles_per_row; t += blockDim.x / 32) collect(row, t);
      if constexpr (kNorm) {
#pragma unroll 1
        for (uint32_t t = warp; t < p.tiles_per_row; t += blockDim.x / 32) add_residual(row, t);
        __syncthreads();
        const RowScale scale = row_scale<T, kFp8>(p, shared, row, threadIdx.x == 0);
#pragma unroll 1
        for (uint32_t t = warp; t < p.tiles_per_row; t += blockDim.x / 32) norm(row, t, scale);
        __syncthreads();  // before the next row's statistics
      } else {
#pragma unroll 1
        for (uint32_t t = warp; t < p.tiles_per_row; t += blockDim.x / 32) {
          const Place here = place(row, t);
          float f[8];
          recall(t, f);
          if (here.active) store8<T>(p.out, here.element, f);
        }
      }
    }
    if (blockIdx.x == 0 && warp == 0) {
      check_record(p, epoch, slot, glance_record(p, slot), note);
    }
    __syncthreads();  // every warp has read the state
    if (warp == 0) store_state(p, epoch);
    if (note != 0) report(p, note, epoch);
    if (p.tail_fence) ptx::fence_sys();
  }
};

template <class T, Output kOut>
__global__ void __launch_bounds__(kGeneralThreads, 2)
    general_kernel(const __grid_constant__ Params p, const __grid_constant__ View view) {
  __shared__ RowShared shared;
  extern __shared__ float4 sums[];
  if (only_prefetches(p)) return;
  General<T, kOut> kernel{p, view, shared, reinterpret_cast<float*>(sums)};
  kernel.run();
}

}  // namespace sm120
