// SPDX-License-Identifier: Apache-2.0
// Weight prefetch as tvm-ffi functions. The array of chunks is int64 [chunks, 2] in device memory.
#include "cuda/prefetch.h"

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include "cuda/channel.h"
#include "ffi/common.h"

namespace sm120::ffi {
namespace {

using tvm::ffi::TensorView;

// Rows first .. first + count - 1 of the array.
const Ahead* chunks_of(const TensorView& array, int64_t first, int64_t count) {
  const DLDataType dtype = array.dtype();
  if (dtype.code != kDLInt || dtype.bits != 64 || array.ndim() != 2 || array.size(1) != 2) {
    TVM_FFI_THROW(TypeError) << "chunks must be int64 [chunks, 2]";
  }
  if (first < 0 || count < 0 || first + count > array.size(0)) {
    TVM_FFI_THROW(ValueError) << "chunks " << first << " to " << first + count << " of "
                              << array.size(0);
  }
  return static_cast<const Ahead*>(data(array)) + first;
}

void cuda_prefetch(TensorView array, int64_t first, int64_t count, int64_t ctas, int64_t stream) {
  const Ahead* chunks = chunks_of(array, first, count);
  if (ctas < 1) TVM_FFI_THROW(ValueError) << "a prefetch needs a CTA, not " << ctas;
  if (count == 0) return;
  prefetch_launch(chunks, static_cast<uint32_t>(count), static_cast<uint32_t>(ctas),
                  reinterpret_cast<cudaStream_t>(stream));
}

// The next call of the channel asks for the chunks, by so many CTAs more.
void cuda_prefetch_in_next(int64_t handle, TensorView array, int64_t first, int64_t count,
                           int64_t ctas) {
  const Ahead* chunks = chunks_of(array, first, count);
  if (ctas < 1) TVM_FFI_THROW(ValueError) << "a prefetch needs a CTA, not " << ctas;
  reinterpret_cast<Channel*>(handle)->set_ahead(chunks, static_cast<uint32_t>(count),
                                                static_cast<uint32_t>(ctas));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_prefetch, cuda_prefetch);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cuda_prefetch_in_next, cuda_prefetch_in_next);

}  // namespace sm120::ffi
