// SPDX-License-Identifier: Apache-2.0
// Instantiates the flat kernels of one dtype and finds them by their run-time parameters.
#pragma once

#include "flat.cuh"
#include "kernels.h"

namespace sm120 {

template <class T, bool kNorm, bool kTwoShot, int kWorld>
const void* flat_of_units(uint32_t units) {
  if (units == 1) return reinterpret_cast<const void*>(&flat_kernel<T, kNorm, kTwoShot, kWorld, 1>);
  if constexpr (keeps_in_registers(kWorld, 2)) {
    if (units == 2)
      return reinterpret_cast<const void*>(&flat_kernel<T, kNorm, kTwoShot, kWorld, 2>);
  }
  return reinterpret_cast<const void*>(&flat_kernel<T, kNorm, kTwoShot, kWorld, 0>);
}

template <class T, bool kNorm>
const void* flat_of_world(bool two_shot, uint32_t world, uint32_t units) {
  if (!has_flat(world, two_shot)) return nullptr;
  if (world == 2) return flat_of_units<T, kNorm, false, 2>(units);
  if (world == 4) {
    return two_shot ? flat_of_units<T, kNorm, true, 4>(units)
                    : flat_of_units<T, kNorm, false, 4>(units);
  }
  return two_shot ? flat_of_units<T, kNorm, true, 8>(units)
                  : flat_of_units<T, kNorm, false, 8>(units);
}

template <class T>
const void* flat_of(bool norm, bool two_shot, uint32_t world, uint32_t units) {
  return norm ? flat_of_world<T, true>(two_shot, world, units)
              : flat_of_world<T, false>(two_shot, world, units);
}

}  // namespace sm120
