// SPDX-License-Identifier: Apache-2.0
// 16-byte vectors of a dtype: arrived or not, canonical, to and from fp32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../core/codec.h"
#include "ptx.cuh"

namespace sm120 {

inline constexpr uint32_t kVec = 16;    // bytes
inline constexpr uint32_t kUnit = 512;  // bytes that a warp moves with one instruction

struct Bf16 {
  static constexpr Dtype kDtype = Dtype::kBf16;
  static __device__ __forceinline__ float2 unpack(uint32_t w) {
    return float2{__uint_as_float(w << 16), __uint_as_float(w & 0xFFFF0000u)};
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&v);
  }
  // One rounding of the exact sum. For two addends that is what rounding their fp32 sum gives:
  // either the fp32 sum is exact, or the smaller addend is too small to move the larger.
  static __device__ __forceinline__ uint32_t add(uint32_t a, uint32_t b) {
    const __nv_bfloat162 v = __hadd2_rn(*reinterpret_cast<const __nv_bfloat162*>(&a),
                                        *reinterpret_cast<const __nv_bfloat162*>(&b));
    return *reinterpret_cast<const uint32_t*>(&v);
  }
};

struct F16 {
  static constexpr Dtype kDtype = Dtype::kF16;
  static __device__ __forceinline__ float2 unpack(uint32_t w) {
    return __half22float2(*reinterpret_cast<const __half2*>(&w));
  }
  static __device__ __forceinline__ uint32_t pack(float low, float high) {
    const __half2 v = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&v);
  }
  static __device__ __forceinline__ uint32_t add(uint32_t a, uint32_t b) {
    const __half2 v =
        __hadd2_rn(*reinterpret_cast<const __half2*>(&a), *reinterpret_cast<const __half2*>(&b));
    return *reinterpret_cast<const uint32_t*>(&v);
  }
};

// Nonzero when a 16-bit lane of `w` is 0xFFFF: the "has a zero halfword" test on ~w.
__device__ __forceinline__ uint32_t missing16(uint32_t w) {
  return (~w - 0x00010001u) & w & 0x80008000u;
}

__device__ __forceinline__ bool arrived16(uint4 v) {
  return (missing16(v.x) | missing16(v.y) | missing16(v.z) | missing16(v.w)) == 0;
}
__device__ __forceinline__ bool arrived32(uint4 v) {
  return v.x != 0xFFFFFFFFu && v.y != 0xFFFFFFFFu && v.z != 0xFFFFFFFFu && v.w != 0xFFFFFFFFu;
}
// Same test with byte lanes.
__device__ __forceinline__ bool arrived8(uint32_t w) {
  return ((~w - 0x01010101u) & w & 0x80808080u) == 0;
}

// A lane of 0xFFFF is a NaN; send the canonical one instead. Other NaNs travel as they are: the sum
// makes them canonical.
__device__ __forceinline__ uint32_t sendable16(uint32_t w) {
  if ((w & 0xFFFFu) == 0xFFFFu) w ^= 0x8000u;
  if (w >= 0xFFFF0000u) w ^= 0x80000000u;
  return w;
}
__device__ __forceinline__ uint4 sendable16(uint4 v) {
  if (!arrived16(v)) v = uint4{sendable16(v.x), sendable16(v.y), sendable16(v.z), sendable16(v.w)};
  return v;
}
__device__ __forceinline__ uint4 sendable32(uint4 v) {
  return uint4{canonical_f32(v.x), canonical_f32(v.y), canonical_f32(v.z), canonical_f32(v.w)};
}

__device__ __forceinline__ uint4 all_ones() { return uint4{~0u, ~0u, ~0u, ~0u}; }
__device__ __forceinline__ uint4 nan16() {
  return uint4{0x7FFF7FFFu, 0x7FFF7FFFu, 0x7FFF7FFFu, 0x7FFF7FFFu};
}
__device__ __forceinline__ uint4 nan32() { return uint4{kNan32, kNan32, kNan32, kNan32}; }

// Thread `me` of `threads` clears its share of `units` vectors.
__device__ __forceinline__ void clear_units(char* base, uint32_t units, uint32_t me,
                                            uint32_t threads) {
  for (uint32_t i = me; i < units; i += threads)
    ptx::st_wire(base + static_cast<uint64_t>(i) * kVec, all_ones());
}

template <class T>
__device__ __forceinline__ void unpack8(uint4 v, float (&f)[8]) {
  const float2 a = T::unpack(v.x), b = T::unpack(v.y), c = T::unpack(v.z), d = T::unpack(v.w);
  f[0] = a.x, f[1] = a.y, f[2] = b.x, f[3] = b.y, f[4] = c.x, f[5] = c.y, f[6] = d.x, f[7] = d.y;
}
template <class T>
__device__ __forceinline__ uint4 pack8(const float (&f)[8]) {
  return uint4{T::pack(f[0], f[1]), T::pack(f[2], f[3]), T::pack(f[4], f[5]), T::pack(f[6], f[7])};
}

template <class T>
__device__ __forceinline__ uint4 add8(uint4 a, uint4 b) {
  return uint4{T::add(a.x, b.x), T::add(a.y, b.y), T::add(a.z, b.z), T::add(a.w, b.w)};
}

}  // namespace sm120
