// SPDX-License-Identifier: Apache-2.0
#include "channel.h"
#include "prefetch.cuh"

namespace sm120 {
namespace {

constexpr uint32_t kThreads = 128;

__global__ void __launch_bounds__(kThreads) prefetch_kernel(const Ahead* chunks, uint32_t count) {
  const uint32_t warps = kThreads / 32;
  prefetch_ahead(chunks, count, blockIdx.x * warps + threadIdx.x / 32, gridDim.x * warps);
}

}  // namespace

void prefetch_launch(const Ahead* chunks, uint32_t count, uint32_t ctas, cudaStream_t stream) {
  prefetch_kernel<<<ctas, kThreads, 0, stream>>>(chunks, count);
  check(cudaGetLastError(), "launch the prefetch");
}

}  // namespace sm120
