// SPDX-License-Identifier: Apache-2.0
// Chunks of weights to bring into L2 while a sum waits for the wire; see
// python/sglang_sm120/verify/prefetch.py for which.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace sm120 {

inline constexpr uint32_t kLine = 128;  // bytes that one plain prefetch brings

// Address and size are multiples of 16; at most 2^31 bytes.
struct Ahead {
  uint64_t address;
  uint64_t bytes;
};
static_assert(sizeof(Ahead) == 16);

// Ask for `count` chunks of an array in device memory, from a kernel of `ctas` CTAs on this stream:
// what benchmark/prefetch.py compares CTAs beside a sum's own with.
void prefetch_launch(const Ahead* chunks, uint32_t count, uint32_t ctas, cudaStream_t stream);

}  // namespace sm120
