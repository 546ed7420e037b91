// SPDX-License-Identifier: Apache-2.0
// What a kernel is given. Plain data; everything here is constant for a captured graph. What
// changes from call to call (epoch, what to clear) lives in device memory, see CtaState.
#pragma once

#include "../core/layout.h"
#include "prefetch.h"

namespace sm120 {

inline constexpr uint32_t kMaxCtas = 128;         // of one launch
inline constexpr uint32_t kEpochWrap = 3u << 28;  // a multiple of kSlots that fits CallRecord
inline constexpr uint32_t kMaxThreads = 1024;     // of a flat kernel's CTA
inline constexpr uint32_t kGeneralThreads = 512;

// One per CTA index, private to this rank's GPU. Every CTA reads its own before it starts and
// writes its own (and those of CTAs this launch does not have) when it ends: a counter without
// atomics or a last CTA.
struct alignas(16) CtaState {
  uint32_t epoch;   // calls begun, modulo kEpochWrap
  uint32_t reduce;  // 16-byte units that the previous call left in its slot, per region
  uint32_t cross;
  uint32_t gather;
};

enum class Quant : uint8_t { kNone = 0, kToken = 1, kGroup = 2 };
// What a kernel makes of the sum: itself, the residual and the norm, or these as FP8.
enum class Output : uint8_t { kSum = 0, kNorm = 1, kFp8 = 2 };
inline constexpr uint32_t kQuantGroup = 128;

// Fields that a flat kernel reads before its first store come first: constants are fetched in
// lines.
struct Params {
  // tensors
  const char* x;
  const char* residual;
  const char* weight;
  char* out;  // [rows, hidden] in the dtype, or FP8 when quant != kNone
  char* residual_out;
  float* scale;     // FP8: [rows] or [rows, hidden / 128]
  CtaState* state;  // kMaxCtas of them
  uint32_t* claim;  // device word: the first warp to fail takes it
  // call
  uint32_t rows;
  uint32_t hidden;
  uint32_t tiles_per_row;
  uint32_t world;
  uint32_t rank;
  // geometry of the flat kernels: a row is shared by group_warps warps in each of 2^cluster_log2
  // CTAs
  uint32_t group_warps;
  uint32_t rows_per_cta;
  uint32_t cluster_log2;
  uint32_t units;       // tiles per warp
  uint32_t row_stride;  // rows that the grid covers at once
  uint32_t ctas;        // of this launch that sum; further ones only prefetch
  uint32_t slot0;       // offsets in a slab, which is below 4 GiB: slot 0, and regions in a slot
  uint32_t slot_bytes;
  uint32_t cross_offset;
  uint32_t gather_offset;
  float eps;
  float inverse_hidden;
  uint8_t op;
  uint8_t dtype;
  Quant quant;
  uint8_t gemma;
  uint8_t weight_f32;
  uint8_t codec;
  uint8_t partial;
  uint8_t tail_fence;     // slabs in host memory: order the clearing before the next call's pushes
  uint8_t scout;          // slabs in host memory and a large call: look at little before all
  uint8_t early;          // let the next kernel of the stream be scheduled once x is read
  char* peer[kMaxWorld];  // slab of every rank as mapped here; null where it is not
  // what this call touches, in 16-byte units, for the next call to clear
  uint32_t touched_reduce;
  uint32_t touched_cross;
  uint32_t touched_gather;
  uint32_t timeout_units;  // of 1.024 us
  uint32_t plan_hash;
  uint32_t channel;
  FlightRecord* flight;  // pinned host memory
  // memory to bring into L2 during the wait
  const Ahead* ahead;
  uint32_t ahead_count;
};

}  // namespace sm120
