// SPDX-License-Identifier: Apache-2.0
// The two ends of a broadcast by one sum as tvm-ffi functions. Arrays come as [address, words,
// address, words, ...].
#include "cuda/share.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include "ffi/common.h"

namespace sm120::ffi {
namespace {

using tvm::ffi::Array;
using tvm::ffi::TensorView;

// The arrays, which must fit into `halves`.
Shared shared_from(const Array<int64_t>& arrays, int64_t halves) {
  const auto count = static_cast<uint32_t>(arrays.size() / 2);
  if (arrays.size() % 2 != 0 || count == 0 || count > kMostShared) {
    TVM_FFI_THROW(ValueError) << "1 to " << kMostShared << " arrays as address and words, not "
                              << arrays.size() << " numbers";
  }
  Shared shared{};
  int64_t words = 0;
  for (uint32_t k = 0; k < kMostShared; ++k) {
    if (k < count) {
      shared.at[k] = reinterpret_cast<int32_t*>(static_cast<intptr_t>(arrays[2 * k]));
      words += arrays[2 * k + 1];
    }
    shared.end[k] = static_cast<uint32_t>(words);
  }
  if (2 * words > halves || words == 0 || halves % 2 != 0 || halves > INT32_MAX) {
    TVM_FFI_THROW(ValueError) << words << " words in a row of " << halves << " halves";
  }
  return shared;
}

float* row_of(const TensorView& row) {
  if (dtype_from(row.dtype()) != Dtype::kF32) TVM_FFI_THROW(TypeError) << "the row must be float32";
  return static_cast<float*>(data(row));
}

void cuda_share_pack(Array<int64_t> arrays, bool contributes, TensorView row, int64_t stream) {
  const Shared shared = shared_from(arrays, row.numel());
  share_pack(shared, contributes, row_of(row), static_cast<uint32_t>(row.numel()),
             reinterpret_cast<cudaStream_t>(stream));
}

void cuda_share_unpack(TensorView row, Array<int64_t> arrays, int64_t stream) {
  share_unpack(row_of(row), shared_from(arrays, row.numel()),
               reinterpret_cast<cudaStream_t>(stream));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_share_pack, cuda_share_pack);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_share_unpack, cuda_share_unpack);

}  // namespace sm120::ffi
