// SPDX-License-Identifier: Apache-2.0
// The kernels as addresses, so that one file launches what several files compile.
#pragma once

#include "params.h"

namespace sm120 {

inline constexpr uint32_t kMostUnits = 4;  // tiles of a row that a warp of a flat kernel can hold

// Null where a shape has no flat kernel: the general one serves it.
const void* flat_one_shot_2(Dtype dtype, Output out, uint32_t units);
const void* flat_one_shot_4(Dtype dtype, Output out, uint32_t units);
const void* flat_one_shot_8(Dtype dtype, Output out, uint32_t units);
const void* flat_two_shot_4(Dtype dtype, Output out, uint32_t units);
const void* flat_two_shot_8(Dtype dtype, Output out, uint32_t units);
const void* general(Dtype dtype, Output out);
const void* relay(Dtype dtype, Output out);

inline const void* flat(Dtype dtype, Output out, bool two_shot, uint32_t world, uint32_t units) {
  if (dtype == Dtype::kF32) return nullptr;
  // Two-shot at world 2 moves as many bytes as one-shot with a hop more.
  if (world == 2) return two_shot ? nullptr : flat_one_shot_2(dtype, out, units);
  if (world == 4) {
    return two_shot ? flat_two_shot_4(dtype, out, units) : flat_one_shot_4(dtype, out, units);
  }
  if (world != 8) return nullptr;
  return two_shot ? flat_two_shot_8(dtype, out, units) : flat_one_shot_8(dtype, out, units);
}

}  // namespace sm120
