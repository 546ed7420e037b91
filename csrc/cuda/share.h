// SPDX-License-Identifier: Apache-2.0
// Integers of rank 0 for all ranks by one sum: the row that each rank contributes, and what is in
// the sum; see python/sglang_sm120/comm/share.py.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace sm120 {

inline constexpr uint32_t kMostShared = 4;  // arrays in one sum

// Arrays one after another. Word i of all is halves 2 i (the low one) and 2 i + 1 of the row,
// signed, as fp32.
struct Shared {
  int32_t* at[kMostShared];
  uint32_t end[kMostShared];  // words of the arrays up to and with this one
};

// row[0 .. halves - 1]: the arrays' halves, or zeros where this rank does not contribute. `halves`
// is even, and at least twice the words; what lies behind them is zero.
void share_pack(const Shared& arrays, bool contributes, float* row, uint32_t halves,
                cudaStream_t stream);

// The arrays from the halves of a sum.
void share_unpack(const float* row, const Shared& arrays, cudaStream_t stream);

}  // namespace sm120
