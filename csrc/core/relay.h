// SPDX-License-Identifier: Apache-2.0
// The relay: sums through memory that costs a link to write and to read (pinned host memory, GPUs
// without P2P). Every rank writes an outbox of its own, each byte once, and its peers read it
// there. No sentinels and no clearing: a row's flag says that what it stands for is complete.
//
//   one-shot  an outbox holds the rank's whole contribution; everyone sums all of them
//   two-shot  tile t is summed by rank t mod world; an outbox holds the contribution to the tiles
//             of others and, at the rank's own tiles, the finished sums, which everyone reads
//
// A message of S bytes in a world of N costs a rank S out, and (N - 1) S in for one-shot or
// 2 (N - 1)/N S in for two-shot.
//
// Flags are numbers of relay calls (tickets, from 1, 64 bits: they never wrap), so a flag left by
// an earlier call never equals the one waited for, whatever that call's shape.
#pragma once

#include "layout.h"

namespace sm120 {

// Behind those of core/schedule.h, whose View does not know them.
inline constexpr Schedule kRelayOneShot{kSchedules};
inline constexpr Schedule kRelayTwoShot{kSchedules + 1};
SM120_HD constexpr bool is_relay(Schedule schedule) {
  return schedule == kRelayOneShot || schedule == kRelayTwoShot;
}

// Relay call n uses slot n mod 2. A rank begins n + 1 only after its call n has ended, and ends n +
// 1 only after it has seen a flag of n + 1 from every rank: when anyone begins n + 2, nobody reads
// n.
#ifndef SM120_RELAY_SLOTS
#define SM120_RELAY_SLOTS 2  // a test builds with 1, and must see wrong sums
#endif
inline constexpr uint32_t kRelaySlots = SM120_RELAY_SLOTS;
SM120_HD constexpr uint32_t relay_slot(uint64_t ticket) {
  return static_cast<uint32_t>(ticket % kRelaySlots);
}

// What a flag says of its row: the contribution is there, or the sums of the rank's own tiles are.
enum class RelayFlag : uint32_t { kContribution = 0, kResult = 1 };
inline constexpr uint32_t kRelayRowFlags = 32;  // bytes: a row's flags share a memory sector

// The outboxes of one rank, behind its tile slots. Depends on the capacity only.
struct RelayLayout {
  uint64_t data_bytes;  // of one slot: tiles in order, rows padded to whole tiles
  uint64_t slot_bytes;  // with a row's flags for as many rows as tiles of the smallest size
  uint64_t bytes;

  SM120_HD constexpr uint64_t tile(uint32_t slot, uint32_t index, Dtype dtype) const {
    return slot * slot_bytes + static_cast<uint64_t>(index) * kTile * dtype_bytes(dtype);
  }
  SM120_HD constexpr uint64_t flag(uint32_t slot, uint32_t row, RelayFlag which) const {
    return slot * slot_bytes + data_bytes + static_cast<uint64_t>(row) * kRelayRowFlags +
           static_cast<uint32_t>(which) * sizeof(uint64_t);
  }
};

SM120_HD constexpr RelayLayout make_relay_layout(uint64_t capacity) {
  constexpr uint64_t smallest_row = kTile * 2;
  RelayLayout l{};
  l.data_bytes = round_up(capacity, kAlign);
  l.slot_bytes = l.data_bytes + round_up(capacity / smallest_row * kRelayRowFlags, kAlign);
  l.bytes = kRelaySlots * l.slot_bytes;
  return l;
}

// Whether a call fits: padded to tiles, no more than the capacity. Needs one island (a sum of
// several rounds each island's partial) and the dtype's own codec.
SM120_HD constexpr bool relay_fits(uint64_t capacity, const Topology& topology, Dtype dtype,
                                   const Shape& shape) {
  return topology.islands == 1 &&
         static_cast<uint64_t>(shape.rows) * shape.tiles_per_row * kTile * dtype_bytes(dtype) <=
             capacity;
}

// One rank's part of a row; plain data, fit to be a kernel parameter. Quotients of tile numbers, at
// most 2^8, are a multiplication: `inverse` is ceil(2^16 / n).
struct RelayShare {
  uint32_t world;
  uint32_t rank;
  uint32_t two_shot;
  uint32_t world_inverse;
  uint32_t others_inverse;
  uint32_t sends;     // tiles whose contribution peers read from my outbox
  uint32_t sums;      // tiles that I sum
  uint32_t collects;  // tiles whose sum I read from its owner

  SM120_HD constexpr uint32_t owner(uint32_t t) const {
    return t - (t * world_inverse >> 16) * world;
  }
  // The k-th tile that another rank owns: world - 1 in every run of `world`.
  SM120_HD constexpr uint32_t foreign(uint32_t k) const {
    const uint32_t run = k * others_inverse >> 16, i = k - run * (world - 1);
    return run * world + i + (i >= rank ? 1u : 0u);
  }
  SM120_HD constexpr uint32_t send(uint32_t k) const { return two_shot != 0 ? foreign(k) : k; }
  SM120_HD constexpr uint32_t sum(uint32_t k) const { return two_shot != 0 ? k * world + rank : k; }
};

constexpr RelayShare make_relay_share(Schedule schedule, uint32_t world, uint32_t rank,
                                      uint32_t tiles_per_row) {
  const bool two_shot = schedule == kRelayTwoShot;
  const uint32_t owned = (tiles_per_row + world - 1 - rank) / world;
  RelayShare s{};
  s.world = world;
  s.rank = rank;
  s.two_shot = two_shot ? 1 : 0;
  s.world_inverse = ((1u << 16) + world - 1) / world;
  s.others_inverse = ((1u << 16) + world - 2) / (world - 1);
  s.sends = two_shot ? tiles_per_row - owned : tiles_per_row;
  s.sums = two_shot ? owned : tiles_per_row;
  s.collects = two_shot ? tiles_per_row - owned : 0;
  return s;
}

}  // namespace sm120
