// SPDX-License-Identifier: Apache-2.0
// Small conversions that every binding of the host library needs.
#pragma once

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/string.h>

#include "core/islands.h"
#include "core/numeric.h"

namespace sm120::ffi {

inline void* data(const tvm::ffi::TensorView& tensor) {
  return static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset();
}

inline Dtype dtype_from(DLDataType dtype) {
  if (dtype.lanes == 1 && dtype.code == kDLFloat && dtype.bits == 32) return Dtype::kF32;
  if (dtype.lanes == 1 && dtype.code == kDLBfloat && dtype.bits == 16) return Dtype::kBf16;
  if (dtype.lanes == 1 && dtype.code == kDLFloat && dtype.bits == 16) return Dtype::kF16;
  TVM_FFI_THROW(TypeError) << "dtype must be float32, bfloat16 or float16";
}

inline Topology topology_from(int64_t world, const tvm::ffi::String& islands) {
  const ParsedIslands parsed =
      parse_islands(static_cast<int>(world), islands.data(), static_cast<int>(islands.size()));
  switch (parsed.error) {
    case IslandsError::kNone:
      return parsed.topology;
    case IslandsError::kWorld:
      TVM_FFI_THROW(ValueError) << "world " << world << " is outside 1.." << kMaxWorld;
    case IslandsError::kSyntax:
      TVM_FFI_THROW(ValueError) << "islands \"" << islands << "\": cannot read character "
                                << parsed.where + 1 << "; write \"0-3;4-7\" or \"0,1;2,3\"";
    case IslandsError::kRange:
      TVM_FFI_THROW(ValueError) << "islands \"" << islands << "\": rank " << parsed.where
                                << " is outside world " << world;
    case IslandsError::kRepeated:
      TVM_FFI_THROW(ValueError) << "islands \"" << islands << "\": rank " << parsed.where
                                << " appears twice";
    default:
      TVM_FFI_THROW(ValueError) << "islands \"" << islands << "\": rank " << parsed.where
                                << " is in no island";
  }
}

}  // namespace sm120::ffi
