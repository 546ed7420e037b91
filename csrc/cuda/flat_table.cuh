// SPDX-License-Identifier: Apache-2.0
// Instantiates the flat kernels of one world and schedule and finds them by their run-time
// parameters.
#pragma once

#include "flat.cuh"
#include "kernels.h"

namespace sm120 {

// kMost: most tiles per warp, 1, 2 or 4. One-shot with many sources is for few rows only.
template <class T, Output kOut, bool kTwoShot, int kWorld, int kMost>
const void* flat_of_units(uint32_t units) {
  if (units > kMost) return nullptr;
  if (units == 1) return reinterpret_cast<const void*>(&flat_kernel<T, kOut, kTwoShot, kWorld, 1>);
  if constexpr (kMost >= 2) {
    if (units == 2) {
      return reinterpret_cast<const void*>(&flat_kernel<T, kOut, kTwoShot, kWorld, 2>);
    }
  }
  return reinterpret_cast<const void*>(&flat_kernel<T, kOut, kTwoShot, kWorld, kMost>);
}

template <class T, bool kTwoShot, int kWorld, int kMost>
const void* flat_of_output(Output out, uint32_t units) {
  switch (out) {
    case Output::kSum:
      return flat_of_units<T, Output::kSum, kTwoShot, kWorld, kMost>(units);
    case Output::kNorm:
      return flat_of_units<T, Output::kNorm, kTwoShot, kWorld, kMost>(units);
    default:
      return flat_of_units<T, Output::kFp8, kTwoShot, kWorld, kMost>(units);
  }
}

template <bool kTwoShot, int kWorld, int kMost>
const void* flat_of(Dtype dtype, Output out, uint32_t units) {
  return dtype == Dtype::kBf16 ? flat_of_output<Bf16, kTwoShot, kWorld, kMost>(out, units)
                               : flat_of_output<F16, kTwoShot, kWorld, kMost>(out, units);
}

}  // namespace sm120
