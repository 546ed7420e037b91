// SPDX-License-Identifier: Apache-2.0
#include "flat_table.cuh"

namespace sm120 {

const void* flat_two_shot_4(Dtype dtype, Output out, uint32_t units) {
  return flat_of<true, 4, 4>(dtype, out, units);
}

}  // namespace sm120
