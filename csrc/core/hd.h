// SPDX-License-Identifier: Apache-2.0
// One macro and two bit casts, so that the same headers serve the CPU engine and the CUDA kernels.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define SM120_HD __host__ __device__ __forceinline__
#else
#define SM120_HD inline __attribute__((always_inline))
#endif

namespace sm120 {

SM120_HD uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

SM120_HD float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

template <class T>
SM120_HD constexpr T round_up(T value, T unit) {
  return (value + unit - 1) / unit * unit;
}

}  // namespace sm120
