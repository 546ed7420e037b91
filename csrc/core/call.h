// SPDX-License-Identifier: Apache-2.0
// The record a rank sends ahead of its data, so that a call with another shape is an error, not a
// hang.
#pragma once

#include "schedule.h"
#include "tile.h"

namespace sm120 {

enum class Op : uint8_t { kAllReduce = 0, kAllReduceRmsNorm = 1, kAllReduceRmsNormFp8 = 2 };

// Eight 16-bit lanes, none of which can be 0xFFFF: validity is in the lanes, as for tiles.
struct CallRecord {
  uint16_t epoch_low;   // 15 bits
  uint16_t epoch_high;  // 15 bits
  uint16_t rows_low;    // 15 bits
  uint16_t rows_high;   // 15 bits
  uint16_t hidden;      // in units of 8 elements
  uint16_t kind;        // op << 8 | dtype
  uint16_t plan;        // 15 bits of plan_hash
  uint16_t zero;
};
static_assert(sizeof(CallRecord) == 16);

SM120_HD constexpr CallRecord make_record(uint64_t epoch, Op op, Dtype dtype, const Shape& shape,
                                          uint32_t plan_hash) {
  return CallRecord{
      static_cast<uint16_t>(epoch & 0x7FFF),
      static_cast<uint16_t>((epoch >> 15) & 0x7FFF),
      static_cast<uint16_t>(shape.rows & 0x7FFF),
      static_cast<uint16_t>((shape.rows >> 15) & 0x7FFF),
      static_cast<uint16_t>(shape.hidden / kHiddenUnit),
      static_cast<uint16_t>(static_cast<uint32_t>(op) << 8 | static_cast<uint32_t>(dtype)),
      static_cast<uint16_t>(plan_hash & 0x7FFF),
      0};
}

SM120_HD constexpr uint32_t record_rows(const CallRecord& r) {
  return static_cast<uint32_t>(r.rows_high) << 15 | r.rows_low;
}
SM120_HD constexpr uint32_t record_hidden(const CallRecord& r) { return r.hidden * kHiddenUnit; }
inline constexpr uint32_t kEpochMask = (1u << 30) - 1;  // of the epoch bits in a record
SM120_HD constexpr uint32_t record_epoch(const CallRecord& r) {
  return static_cast<uint32_t>(r.epoch_high) << 15 | r.epoch_low;
}
SM120_HD constexpr bool record_arrived(const CallRecord& r) {
  return r.epoch_low != 0xFFFF && r.epoch_high != 0xFFFF && r.rows_low != 0xFFFF &&
         r.rows_high != 0xFFFF && r.hidden != 0xFFFF && r.kind != 0xFFFF && r.plan != 0xFFFF &&
         r.zero != 0xFFFF;
}
SM120_HD constexpr bool same_call(const CallRecord& a, const CallRecord& b) {
  return a.epoch_low == b.epoch_low && a.epoch_high == b.epoch_high && a.rows_low == b.rows_low &&
         a.rows_high == b.rows_high && a.hidden == b.hidden && a.kind == b.kind && a.plan == b.plan;
}

// FNV-1a over every field that changes what travels or how it is summed; equal on ranks that agree.
constexpr uint32_t plan_hash(const Plan& plan) {
  uint32_t h = 2166136261u;
  auto mix = [&](uint32_t byte) { h = (h ^ (byte & 0xFF)) * 16777619u; };
  mix(plan.topology.world);
  for (int r = 0; r < plan.topology.world; ++r) mix(plan.topology.island_of[r]);
  mix(static_cast<uint32_t>(plan.schedule));
  mix(static_cast<uint32_t>(plan.dtype));
  mix(static_cast<uint32_t>(plan.codec));
  mix(static_cast<uint32_t>(plan.partial));
  mix(plan.ctas);
  mix(plan.ctas >> 8);
  return h ^ (h >> 15);
}

}  // namespace sm120
