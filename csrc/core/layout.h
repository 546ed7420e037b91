// SPDX-License-Identifier: Apache-2.0
// The slab: what one rank exposes to its peers. A control page, then three slots of three regions.
// Offsets depend on (topology, capacity) only, never on a message, and are equal on every rank.
#pragma once

#include "call.h"

namespace sm120 {

#ifndef SM120_SLOTS
#define SM120_SLOTS 3  // a test builds with 2, and must see the soak fail
#endif
inline constexpr uint32_t kSlots = SM120_SLOTS;
inline constexpr uint64_t kAlign = 128;
inline constexpr uint64_t kControlBytes = 64 * 1024;

// Call k (counted from 0) uses slot_of(k) and clears slot_to_clear(k), the one call k - 1 used.
// Safe, because a rank contributes to k + 1 only after its call k has ended and finishes k + 1 only
// with data that depends on every rank's part of k + 1: when anyone starts k + 2, all have left k.
// The slot that early peers write (k + 1) was cleared during call k - 1, and nobody writes slot k -
// 1 before k + 2.
SM120_HD constexpr uint32_t slot_of(uint64_t epoch) {
  return static_cast<uint32_t>(epoch % kSlots);
}
SM120_HD constexpr uint32_t slot_to_clear(uint64_t epoch) {
  return static_cast<uint32_t>((epoch + kSlots - 1) % kSlots);
}

struct Layout {
  uint64_t offset[kRegions];  // of a region inside a slot
  uint64_t bytes[kRegions];
  uint64_t slot_bytes;
  uint64_t slab_bytes;
  uint64_t capacity;  // largest message, in padded tile bytes
  uint64_t small;     // the same for one-shot and island two-hop, whose inboxes grow with the world

  SM120_HD constexpr uint64_t slot(uint32_t slot_index) const {
    return kControlBytes + slot_index * slot_bytes;
  }
  // Offset in the slab of one tile.
  SM120_HD constexpr uint64_t at(uint32_t slot_index, Region region, uint32_t index,
                                 uint32_t stride) const {
    return slot(slot_index) + offset[static_cast<int>(region)] +
           static_cast<uint64_t>(index) * stride;
  }
};

// Sizes, with N ranks, k islands of at least m ranks, capacity P, small capacity p (bytes):
//   reduce  max(N p, P + N T)          N contributions to every tile, or N to each owned tile
//   cross   2 k max(p, P / m + T)      k partials per tile, twice the bytes if they travel as fp32
//   gather  P
// each rounded up to 128, T = 1024 the largest tile. The slab is 64 KiB + 3 (reduce + cross +
// gather).
SM120_HD constexpr Layout make_layout(const Topology& topology, uint64_t capacity, uint64_t small) {
  constexpr uint64_t largest_tile = kTile * 4;
  const uint64_t world = topology.world;
  const uint64_t islands = topology.islands;
  const uint64_t shared = capacity + world * largest_tile;
  const uint64_t each = capacity / topology.smallest() + largest_tile;
  Layout l{};
  l.capacity = capacity;
  l.small = small;
  l.bytes[0] = round_up(world * small > shared ? world * small : shared, kAlign);
  l.bytes[1] = islands > 1 ? round_up(2 * islands * (small > each ? small : each), kAlign) : 0;
  l.bytes[2] = round_up(capacity, kAlign);
  l.offset[1] = l.bytes[0];
  l.offset[2] = l.bytes[0] + l.bytes[1];
  l.slot_bytes = l.bytes[0] + l.bytes[1] + l.bytes[2];
  l.slab_bytes = kControlBytes + kSlots * l.slot_bytes;
  return l;
}

// Largest message, in padded tile bytes, that a schedule may carry in this layout.
SM120_HD constexpr uint64_t message_limit(const Layout& layout, Schedule schedule) {
  return schedule == Schedule::kOneShot || schedule == Schedule::kIslandTwoHop ? layout.small
                                                                               : layout.capacity;
}

// Whether a call fits: a pure function of the plan and the shape, so every rank answers alike.
SM120_HD constexpr bool fits(const Layout& layout, const Plan& plan, const Shape& shape) {
  const uint64_t padded =
      static_cast<uint64_t>(shape.rows) * shape.tiles_per_row * kTile * dtype_bytes(plan.dtype);
  return padded <= message_limit(layout, plan.schedule);
}

// What a rank raises in every slab when a wait expires.
enum class Abort : uint32_t { kNone = 0, kMissing = 1, kDied = 2, kLeft = 3, kMismatch = 4 };

SM120_HD constexpr uint32_t abort_code(Abort why, uint32_t culprit, uint32_t reporter) {
  return static_cast<uint32_t>(why) << 16 | culprit << 8 | reporter;
}
SM120_HD constexpr Abort abort_why(uint32_t code) { return static_cast<Abort>(code >> 16); }
SM120_HD constexpr uint32_t abort_culprit(uint32_t code) { return (code >> 8) & 0xFF; }
SM120_HD constexpr uint32_t abort_reporter(uint32_t code) { return code & 0xFF; }

enum class Phase : uint32_t {
  kIdle = 0,
  kPush = 1,
  kReduce = 2,
  kCross = 3,
  kGather = 4,
  kRecord = 5
};

// Where a stuck rank writes whom it waits for.
struct FlightRecord {
  uint32_t valid;
  uint32_t rank;
  uint32_t channel;
  uint32_t phase;  // Phase
  uint32_t tile;
  uint32_t source;  // the missing rank
  uint32_t op;
  uint32_t dtype;
  uint32_t rows;
  uint32_t hidden;
  uint64_t call;
  uint64_t waited_ns;
};

// Whom a rank has been waiting for, told to every peer long before its wait expires, so that the
// rank whose wait expires first can follow the chain to the one at the source of the trouble.
// One word, stored whole: a set bit | call record's epoch (30 bits) | Phase (8; kIdle: the source
// has not begun the call) | step (8) | source (8). Of two words the smaller waits for the earlier
// data.
SM120_HD constexpr uint64_t wait_word(uint32_t epoch, Phase phase, uint32_t step, uint32_t source) {
  return uint64_t{1} << 63 | static_cast<uint64_t>(epoch) << 24 |
         static_cast<uint64_t>(phase) << 16 | step << 8 | source;
}
SM120_HD constexpr int wait_source(uint64_t word) { return static_cast<int>(word & 0xFF); }

// What the reporter of an abort knew; written before the abort word.
struct AbortNote {
  CallRecord reporter_call;
  CallRecord culprit_call;  // kMismatch: the other shape
};

// First bytes of a slab. Fields that different parties write lie on lines of their own.
struct ControlPage {
  alignas(128) uint64_t epoch;             // calls begun on this channel; this rank's own
  alignas(128) uint32_t abort;             // abort_code, 0 while all is well; any rank
  alignas(128) AbortNote note[kMaxWorld];  // one per reporter
  alignas(128) uint32_t owner;             // token of the stream inside a call, 0 when free
  alignas(128) uint32_t left;              // 1 when this rank has closed the channel
  alignas(128) uint32_t sleeping;          // CPU ranks only: 1 while this rank may be asleep ...
  uint32_t doorbell;                       // ... on this word, which senders bump to wake it
  alignas(128) FlightRecord flight;        // this rank's own
  alignas(128) uint64_t waits[kMaxWorld];  // CPU ranks only: wait_word per source, 0 when it moves
  alignas(128) CallRecord record[kSlots][kMaxWorld];  // one per source; cleared with their slot
};
static_assert(sizeof(ControlPage) <= kControlBytes);

}  // namespace sm120
