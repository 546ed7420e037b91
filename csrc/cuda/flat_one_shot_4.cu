// SPDX-License-Identifier: Apache-2.0
#include "flat_table.cuh"

namespace sm120 {

const void* flat_one_shot_4(Dtype dtype, Output out, uint32_t units) {
  return flat_of<false, 4, 2>(dtype, out, units);
}

}  // namespace sm120
