// SPDX-License-Identifier: Apache-2.0
#include "general.cuh"
#include "kernels.h"

namespace sm120 {
namespace {

template <class T>
const void* of(bool norm) {
  return norm ? reinterpret_cast<const void*>(&general_kernel<T, true>)
              : reinterpret_cast<const void*>(&general_kernel<T, false>);
}

}  // namespace

const void* general(Dtype dtype, bool norm) {
  return dtype == Dtype::kBf16  ? of<Bf16>(norm)
         : dtype == Dtype::kF16 ? of<F16>(norm)
                                : of<F32>(norm);
}

}  // namespace sm120
