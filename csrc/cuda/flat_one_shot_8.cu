// SPDX-License-Identifier: Apache-2.0
#include "flat_table.cuh"

namespace sm120 {

const void* flat_one_shot_8(Dtype dtype, Output out, uint32_t units) {
  return flat_of<false, 8, 1>(dtype, out, units);
}

}  // namespace sm120
