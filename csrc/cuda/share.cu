// SPDX-License-Identifier: Apache-2.0
#include "channel.h"
#include "share.h"

namespace sm120 {
namespace {

constexpr uint32_t kThreads = 256;

// Where word i lives, null behind the last.
__device__ int32_t* word_at(const Shared& arrays, uint32_t i) {
  int32_t* at = nullptr;
#pragma unroll
  for (uint32_t k = kMostShared; k-- > 0;) {
    if (i < arrays.end[k]) at = arrays.at[k] + (i - (k > 0 ? arrays.end[k - 1] : 0));
  }
  return at;
}

__global__ void __launch_bounds__(kThreads)
    pack_kernel(const __grid_constant__ Shared arrays, bool contributes, float2* row,
                uint32_t words) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= words) return;
  const int32_t* from = contributes ? word_at(arrays, i) : nullptr;
  const int32_t value = from ? *from : 0;
  row[i] = make_float2(static_cast<int16_t>(value & 0xFFFF), static_cast<int16_t>(value >> 16));
}

__global__ void __launch_bounds__(kThreads)
    unpack_kernel(const float2* row, const __grid_constant__ Shared arrays) {
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  int32_t* to = word_at(arrays, i);
  if (to == nullptr) return;
  const float2 halves = row[i];
  const auto low = static_cast<uint16_t>(static_cast<int16_t>(halves.x));
  *to = static_cast<int32_t>(halves.y) * 0x10000 + low;
}

uint32_t ctas_for(uint32_t words) { return (words + kThreads - 1) / kThreads; }

}  // namespace

void share_pack(const Shared& arrays, bool contributes, float* row, uint32_t halves,
                cudaStream_t stream) {
  pack_kernel<<<ctas_for(halves / 2), kThreads, 0, stream>>>(
      arrays, contributes, reinterpret_cast<float2*>(row), halves / 2);
  check(cudaGetLastError(), "launch the packing of a broadcast");
}

void share_unpack(const float* row, const Shared& arrays, cudaStream_t stream) {
  unpack_kernel<<<ctas_for(arrays.end[kMostShared - 1]), kThreads, 0, stream>>>(
      reinterpret_cast<const float2*>(row), arrays);
  check(cudaGetLastError(), "launch the unpacking of a broadcast");
}

}  // namespace sm120
