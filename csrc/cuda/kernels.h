// SPDX-License-Identifier: Apache-2.0
// The kernels as addresses, so that one file launches what several files compile.
#pragma once

#include "params.h"

namespace sm120 {

// Whether a warp keeps its tiles in registers. Two tiles of eight sources would need more than 64.
constexpr bool keeps_in_registers(uint32_t world, uint32_t units) {
  return units == 1 || (units == 2 && world < 8);
}

const void* flat_bf16(bool norm, bool two_shot, uint32_t world, uint32_t units);
const void* flat_f16(bool norm, bool two_shot, uint32_t world, uint32_t units);
const void* general(Dtype dtype, bool norm);

// Worlds that have flat kernels. Two-shot at world 2 moves as many bytes as one-shot with a hop
// more.
constexpr bool has_flat(uint32_t world, bool two_shot) {
  return (world == 2 && !two_shot) || world == 4 || world == 8;
}

}  // namespace sm120
