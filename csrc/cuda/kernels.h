// SPDX-License-Identifier: Apache-2.0
// The kernels as addresses, so that one file launches what several files compile.
#pragma once

#include "params.h"

namespace sm120 {

// kUnits of the flat kernels: 1 and 2 keep a warp's tiles in registers, 0 is any number.
inline constexpr int kUnitChoices[] = {1, 2, 0};

const void* flat_bf16(bool norm, bool two_shot, uint32_t world, uint32_t units);
const void* flat_f16(bool norm, bool two_shot, uint32_t world, uint32_t units);
const void* general(Dtype dtype, bool norm);

// Worlds that have flat kernels. Two-shot at world 2 moves as many bytes as one-shot with a hop
// more.
constexpr bool has_flat(uint32_t world, bool two_shot) {
  return (world == 2 && !two_shot) || world == 4 || world == 8;
}

}  // namespace sm120
