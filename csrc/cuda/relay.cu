// SPDX-License-Identifier: Apache-2.0
#include "kernels.h"
#include "relay.cuh"

namespace sm120 {
namespace {

template <class T>
const void* of(Output out) {
  switch (out) {
    case Output::kSum:
      return reinterpret_cast<const void*>(&relay_kernel<T, Output::kSum>);
    case Output::kNorm:
      return reinterpret_cast<const void*>(&relay_kernel<T, Output::kNorm>);
    default:
      return reinterpret_cast<const void*>(&relay_kernel<T, Output::kFp8>);
  }
}

}  // namespace

const void* relay(Dtype dtype, Output out) {
  return dtype == Dtype::kBf16 ? of<Bf16>(out) : dtype == Dtype::kF16 ? of<F16>(out) : of<F32>(out);
}

}  // namespace sm120
