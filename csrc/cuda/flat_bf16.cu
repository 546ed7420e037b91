// SPDX-License-Identifier: Apache-2.0
#include "flat_table.cuh"

namespace sm120 {

const void* flat_bf16(bool norm, bool two_shot, uint32_t world, uint32_t units) {
  return flat_of<Bf16>(norm, two_shot, world, units);
}

}  // namespace sm120
