// SPDX-License-Identifier: Apache-2.0
// Ask L2 for memory that the next kernels will read. Nothing is loaded into registers and nothing
// waits: a request that is dropped or late costs its benefit only.
#pragma once

#include "prefetch.h"
#include "ptx.cuh"

namespace sm120 {

// Warp `warp` of `warps` asks for its share of the chunks; chunks early in the list are asked for
// first.
__device__ __forceinline__ void prefetch_ahead(const Ahead* chunks, uint32_t count, uint32_t warp,
                                               uint32_t warps) {
  const uint32_t lane = threadIdx.x & 31;
#if SM120_HAS_CLUSTER
  for (uint32_t i = lane * warps + warp; i < count; i += 32 * warps) {
    const Ahead c = chunks[i];
    ptx::prefetch_bulk(reinterpret_cast<const void*>(c.address), static_cast<uint32_t>(c.bytes));
  }
#else
  for (uint32_t i = warp; i < count; i += warps) {
    const Ahead c = chunks[i];
    for (uint32_t at = lane * kLine; at < c.bytes; at += 32 * kLine) {
      ptx::prefetch_line(reinterpret_cast<const void*>(c.address + at));
    }
  }
#endif
}

}  // namespace sm120
