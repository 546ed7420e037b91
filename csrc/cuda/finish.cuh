// SPDX-License-Identifier: Apache-2.0
// What kernels that take a row tile by tile make of its sum: a lane holds eight elements of a tile,
// in fp32. Shared by the general kernel and the relay.
#pragma once

#include "row.cuh"

namespace sm120 {

struct F32 {
  static constexpr Dtype kDtype = Dtype::kF32;
};

// Eight elements of a user tensor from element `at`, and back.
template <class T>
__device__ __forceinline__ void load8(const char* base, uint64_t at, float (&f)[8]) {
  if constexpr (T::kDtype == Dtype::kF32) {
    const uint4 a = ptx::ld_stream(base + at * 4), b = ptx::ld_stream(base + at * 4 + 16);
    f[0] = __uint_as_float(a.x), f[1] = __uint_as_float(a.y), f[2] = __uint_as_float(a.z);
    f[3] = __uint_as_float(a.w), f[4] = __uint_as_float(b.x), f[5] = __uint_as_float(b.y);
    f[6] = __uint_as_float(b.z), f[7] = __uint_as_float(b.w);
  } else {
    unpack8<T>(ptx::ld_stream(base + at * 2), f);
  }
}
template <class T>
__device__ __forceinline__ void store8(char* base, uint64_t at, const float (&f)[8]) {
  if constexpr (T::kDtype == Dtype::kF32) {
    uint4* to = reinterpret_cast<uint4*>(base + at * 4);
    to[0] = sendable32(uint4{__float_as_uint(f[0]), __float_as_uint(f[1]), __float_as_uint(f[2]),
                             __float_as_uint(f[3])});
    to[1] = sendable32(uint4{__float_as_uint(f[4]), __float_as_uint(f[5]), __float_as_uint(f[6]),
                             __float_as_uint(f[7])});
  } else {
    *reinterpret_cast<uint4*>(base + at * 2) = pack8<T>(f);
  }
}
template <class T>
__device__ __forceinline__ void round8(float (&f)[8]) {
  if constexpr (T::kDtype != Dtype::kF32) {
    const uint4 v = pack8<T>(f);
    unpack8<T>(v, f);
  }
}

// Where a lane's eight elements of tile t of a row are; `active` is false beyond the row's end.
struct Place {
  uint64_t element;
  uint32_t column;
  bool active;
};
__device__ __forceinline__ Place place_of(const Params& p, uint32_t row, uint32_t t,
                                          uint32_t lane) {
  const uint32_t column = t * kTile + lane * 8;
  return Place{static_cast<uint64_t>(row) * p.hidden + column, column, column < p.hidden};
}

// The sum's order: from the first addend, not from +0, which would lose the sign of a zero.
__device__ __forceinline__ void accumulate(bool first, const float (&f)[8], float (&sum)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) sum[i] = first ? f[i] : sum[i] + f[i];
}

template <class T>
__device__ __forceinline__ void load_weight(const Params& p, uint32_t column, float (&w)[8]) {
  if (p.weight_f32) {
    load8<F32>(p.weight, column, w);
  } else {
    load8<T>(p.weight, column, w);
  }
  if (p.gemma) {
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] += 1.0f;
  }
}

// Round the sum `f`, add the residual, store it, leave it rounded in `f`, and note the statistics
// of tile t. Warp-uniform.
template <class T, bool kFp8>
__device__ __forceinline__ void add_residual(const Params& p, RowShared& shared, const Place& here,
                                             uint32_t t, uint32_t lane, float (&f)[8]) {
  float r[8];
  round8<T>(f);
  float squares = 0.0f, amax = 0.0f;
  if (here.active) {
    load8<T>(p.residual, here.element, r);
#pragma unroll
    for (int i = 0; i < 8; ++i) f[i] += r[i];
    store8<T>(p.residual_out, here.element, f);
    round8<T>(f);
    squares = square_sum(f);
    if (kFp8 && p.quant == Quant::kToken) {
      load_weight<T>(p, here.column, r);
      amax = largest_product(f, r);
    }
  }
  squares = warp_sum(squares);
  if (kFp8 && p.quant == Quant::kToken) amax = warp_max(amax);
  if (lane == 0) {
    shared.squares[t] = squares;
    shared.amax[t] = amax;
  }
}

// Normalise what `add_residual` left, and store it, as the dtype or as FP8. Warp-uniform.
template <class T, bool kFp8>
__device__ __forceinline__ void store_normed(const Params& p, uint32_t row, const Place& here,
                                             const RowScale& scale, float (&f)[8]) {
  float w[8];
  if (here.active) load_weight<T>(p, here.column, w);
#pragma unroll
  for (int i = 0; i < 8; ++i) f[i] = here.active ? f[i] * w[i] * scale.rstd : 0.0f;
  if constexpr (!kFp8) {
    if (here.active) store8<T>(p.out, here.element, f);
    return;
  }
  round8<T>(f);
  store_e4m3(p, row, here.column, here.active, f, scale.inverse);
}

}  // namespace sm120
