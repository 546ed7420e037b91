// SPDX-License-Identifier: Apache-2.0
// Residual, RMSNorm and FP8 for one row that several warps, and several CTAs of a cluster, hold
// together. Sums of squares are added per tile by a fixed butterfly and over tiles in a fixed
// order, so that a row's norm does not depend on how many warps, CTAs or other rows there are.
#pragma once

#include <cuda_fp8.h>

#include "params.h"
#include "wire.cuh"

namespace sm120 {

inline constexpr uint32_t kMaxTilesPerRow = 64;  // hidden 16384

struct RowShared {
  alignas(16) float squares[kMaxTilesPerRow];
  float amax[kMaxTilesPerRow];
  uint64_t barrier;
};

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int step = 16; step > 0; step >>= 1) v += __shfl_xor_sync(~0u, v, step);
  return v;
}

// Sums over lanes of K values at once (the same tree as warp_sum, with fewer shuffles). The total
// of value j ends in the lanes l with (l & mask) == lane_of(j).
template <int K>
__device__ __forceinline__ float warp_sums(float (&v)[K]) {
  const uint32_t lane = threadIdx.x & 31;
  int step = 16;
#pragma unroll
  for (int n = K; n > 1; n >>= 1, step >>= 1) {
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      const float keep = upper ? v[i + n / 2] : v[i];
      const float give = upper ? v[i] : v[i + n / 2];
      v[i] = keep + __shfl_xor_sync(~0u, give, step);
    }
  }
  float sum = v[0];
#pragma unroll
  for (int s = 16 / K; s > 0; s >>= 1) sum += __shfl_xor_sync(~0u, sum, s);
  return sum;
}
// Which value a lane holds after warp_sums<K>: the halves are chosen from the top bit down.
template <int K>
__device__ __forceinline__ uint32_t value_of_lane(uint32_t lane) {
  return lane / (32 / K);
}

// Sum of `tiles` partial sums in a fixed order: four interleaved chains.
__device__ __forceinline__ float sum_tiles(const float* squares, uint32_t tiles) {
  float4 sum{0.f, 0.f, 0.f, 0.f};
  uint32_t i = 0;
  for (; i + 4 <= tiles; i += 4) {
    const float4 v = *reinterpret_cast<const float4*>(squares + i);
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
  }
  if (i < tiles) sum.x += squares[i];
  if (i + 1 < tiles) sum.y += squares[i + 1];
  if (i + 2 < tiles) sum.z += squares[i + 2];
  return (sum.x + sum.y) + (sum.z + sum.w);
}

// Eight weights, with Gemma's 1 + weight.
template <class T>
__device__ __forceinline__ void unpack_weight(const Params& p, uint4 raw, float (&w)[8]) {
  unpack8<T>(raw, w);
  if (p.gemma) {
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] += 1.0f;
  }
}

__device__ __forceinline__ float largest(const float (&v)[8]) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(v[i]));
  return most;
}
__device__ __forceinline__ float largest_product(const float (&a)[8], const float (&b)[8]) {
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(a[i] * b[i]));
  return most;
}
// Magnitudes: their bits order like integers, NaN above all.
__device__ __forceinline__ float warp_max(float magnitude) {
  return __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(magnitude)));
}

__device__ __forceinline__ float square_sum(const float (&y)[8]) {
  float s = y[0] * y[0];
#pragma unroll
  for (int i = 1; i < 8; ++i) s = fmaf(y[i], y[i], s);
  return s;
}

__device__ __forceinline__ float max_tiles(const float* amax, uint32_t tiles) {
  float most = 0.0f;
  for (uint32_t i = threadIdx.x & 31; i < tiles; i += 32) {
    most = __uint_as_float(max(__float_as_uint(most), __float_as_uint(amax[i])));
  }
  return warp_max(most);
}

// Dequantised value = code * scale: the largest magnitude maps to 448. Both quotients are correctly
// rounded: a reciprocal and one or two residual corrections (Markstein), within the range where no
// step over- or underflows; outside it, the division itself.
__device__ __forceinline__ float fp8_scale(float amax) {
  if (!(amax > 1e-30f && amax < 1e30f)) return __fdiv_rn(amax, kE4m3Max);
  constexpr float kInverse = 1.0f / kE4m3Max;
  const float q = amax * kInverse;
  return fmaf(fmaf(-q, kE4m3Max, amax), kInverse, q);
}
__device__ __forceinline__ float fp8_inverse(float scale) {
  if (!(scale > 1e-30f && scale < 1e30f)) return scale == 0.0f ? 0.0f : __fdiv_rn(1.0f, scale);
  float r = ptx::reciprocal(scale);
  r = fmaf(r, fmaf(-scale, r, 1.0f), r);
  return fmaf(r, fmaf(-scale, r, 1.0f), r);
}

__device__ __forceinline__ uint2 pack_e4m3(const float (&v)[8], float inverse) {
  uint32_t w[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float2 a{v[4 * h] * inverse, v[4 * h + 1] * inverse};
    const float2 b{v[4 * h + 2] * inverse, v[4 * h + 3] * inverse};
    const uint32_t low = __nv_cvt_float2_to_fp8x2(a, __NV_SATFINITE, __NV_E4M3);
    const uint32_t high = __nv_cvt_float2_to_fp8x2(b, __NV_SATFINITE, __NV_E4M3);
    w[h] = low | high << 16;
  }
  return uint2{w[0], w[1]};
}

// What a row's statistics give: the factor of the norm and, per token, the factor of the FP8 codes.
struct RowScale {
  float rstd;
  float inverse;
};

template <class T, bool kFp8>
__device__ __forceinline__ RowScale row_scale(const Params& p, const RowShared& row, uint32_t index,
                                              bool writes) {
  const float mean = sum_tiles(row.squares, p.tiles_per_row) * p.inverse_hidden;
  RowScale r{rsqrtf(mean + p.eps), 0.0f};
  if (kFp8 && p.quant == Quant::kToken) {
    // Rounding is monotone, so this is the largest magnitude of the rounded row to the last bit.
    const float most = max_tiles(row.amax, p.tiles_per_row) * r.rstd;
    float rounded = most;
    if constexpr (T::kDtype != Dtype::kF32) rounded = T::unpack(T::pack(most, most)).x;
    const float scale = fp8_scale(rounded);
    r.inverse = fp8_inverse(scale);
    if (writes) p.scale[index] = scale;
  }
  return r;
}

// Store eight values of the row, rounded to the dtype, as FP8 codes. Warp-uniform.
__device__ __forceinline__ void store_e4m3(const Params& p, uint32_t row, uint32_t column,
                                           bool active, const float (&f)[8], float inverse) {
  if (p.quant == Quant::kGroup) {
    float most = active ? largest(f) : 0.0f;
#pragma unroll
    for (int step = 8; step > 0; step >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    const float scale = fp8_scale(most);
    inverse = fp8_inverse(scale);
    if (active && column % kQuantGroup == 0) {
      p.scale[static_cast<uint64_t>(row) * (p.hidden / kQuantGroup) + column / kQuantGroup] = scale;
    }
  }
  if (active) {
    *reinterpret_cast<uint2*>(p.out + static_cast<uint64_t>(row) * p.hidden + column) =
        pack_e4m3(f, inverse);
  }
}

// Normalise eight elements from `column` of row `row` and store them, as the dtype or as FP8.
// Warp-uniform; lanes without elements pass active = false.
template <class T, bool kFp8>
__device__ __forceinline__ void store_norm(const Params& p, uint32_t row, uint32_t column,
                                           bool active, uint4 y, uint4 weight,
                                           const RowScale& scale) {
  float f[8], w[8];
  unpack8<T>(y, f);
  unpack_weight<T>(p, weight, w);
#pragma unroll
  for (int i = 0; i < 8; ++i) f[i] = f[i] * w[i] * scale.rstd;
  const uint4 packed = pack8<T>(f);
  const uint64_t at = static_cast<uint64_t>(row) * p.hidden + column;
  if constexpr (!kFp8) {
    if (active) *reinterpret_cast<uint4*>(p.out + at * 2) = packed;
    return;
  }
  unpack8<T>(packed, f);
  store_e4m3(p, row, column, active, f, scale.inverse);
}

}  // namespace sm120
