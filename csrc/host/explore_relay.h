// SPDX-License-Identifier: Apache-2.0
// An exhaustive explorer of the relay (core/relay.h): every interleaving of stores, deliveries,
// flags, waits, reads and call boundaries of a small group.
//
// Model. Each rank runs CTAs, each with rows it takes in turn, in the order of the relay kernel. A
// data cell is one tile in a rank's outbox: two lanes that travel apart, each in its own time, as a
// tag that names the call. A flag is one lane. A fence ends when everything that its CTA stored has
// been delivered. A rank begins call k + 1 when all its CTAs have ended call k.
//
// Reductions, both exact, as in host/explore.h: a store is made at its earliest moment, and a
// delivery is decided when somebody next looks at its lane, or at the fence behind it.
#pragma once

#include "core/relay.h"
#include "host/explore.h"

namespace sm120::host {

enum class RelayVariant : uint8_t {
  kRight = 0,
  kOneSlot = 1,     // every call uses the same slot
  kFlagFirst = 2,   // the flag is stored before the data
  kNoFence = 3,     // data, then flag, in flight together
  kEarlyRead = 4,   // data is read before its flag is seen (a load that passed the wait)
  kBareFlag = 5,    // flags say "there", not of which call
  kShortCount = 6,  // a slot's calls are numbered 1, 2, 1, 2: a counter that wraps at once
};

struct RelayExploreConfig {
  uint32_t world = 3;
  Schedule schedule = kRelayOneShot;
  RelayVariant variant = RelayVariant::kRight;
  uint32_t rows = 2;
  uint32_t ctas = 1;
  // Every second call of a slot has one row, so that the flags of the others stay behind, and may
  // take the other form.
  Schedule second = kRelayOneShot;
  uint32_t calls = 5;
  uint64_t most_states = 200'000'000;
};

ExploreResult explore_relay(const RelayExploreConfig& config);

}  // namespace sm120::host
