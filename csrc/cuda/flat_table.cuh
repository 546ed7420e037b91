// SPDX-License-Identifier: Apache-2.0
// Instantiates the flat kernels of one world and schedule and finds them by their run-time
// parameters.
#pragma once

#include "flat.cuh"
#include "kernels.h"

namespace sm120 {

// kMost: most tiles per warp, 1, 2 or 4. One-shot with many sources is for few rows only.
template <class T, bool kNorm, bool kTwoShot, int kWorld, int kMost>
const void* flat_of_units(uint32_t units) {
  if (units > kMost) return nullptr;
  if (units == 1) return reinterpret_cast<const void*>(&flat_kernel<T, kNorm, kTwoShot, kWorld, 1>);
  if constexpr (kMost >= 2) {
    if (units == 2) {
      return reinterpret_cast<const void*>(&flat_kernel<T, kNorm, kTwoShot, kWorld, 2>);
    }
  }
  return reinterpret_cast<const void*>(&flat_kernel<T, kNorm, kTwoShot, kWorld, kMost>);
}

template <bool kTwoShot, int kWorld, int kMost>
const void* flat_of(Dtype dtype, bool norm, uint32_t units) {
  if (dtype == Dtype::kBf16) {
    return norm ? flat_of_units<Bf16, true, kTwoShot, kWorld, kMost>(units)
                : flat_of_units<Bf16, false, kTwoShot, kWorld, kMost>(units);
  }
  return norm ? flat_of_units<F16, true, kTwoShot, kWorld, kMost>(units)
              : flat_of_units<F16, false, kTwoShot, kWorld, kMost>(units);
}

}  // namespace sm120
