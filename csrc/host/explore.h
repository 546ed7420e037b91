// SPDX-License-Identifier: Apache-2.0
// An exhaustive explorer of the slot protocol: every interleaving of pushes, deliveries, polls,
// clears and call boundaries of a small group, for a schedule taken from core/schedule.h.
//
// Model. Each rank runs one CTA per tile. A CTA pushes; then polls what it needs in order, pushing
// on what becomes ready; at any moment after its first push it clears its share of the stale slot.
// The rank starts call k + 1 when all its CTAs have ended call k. A tile is two lanes that travel
// apart, each in its own time, as a tag that names the call it belongs to; an empty lane is "not
// arrived".
//
// Reductions, both exact. A push is one step at its earliest moment, because a store that has not
// been delivered looks the same as one that has not been made. A delivery is decided when its lane
// is next polled or cleared, because nothing else can tell when it happened.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/schedule.h"

namespace sm120::host {

enum class Variant : uint8_t {
  kRight = 0,      // three slots, call k clears the slot of call k - 1
  kTwoSlots = 1,   // two slots, same rule
  kNoClear = 2,    // three slots, never cleared
  kClearNext = 3,  // three slots, call k clears the slot of call k + 1: too early by one call
  kHostEpoch = 4,  // slots chosen when a graph of two calls was captured, then replayed
};

struct ExploreConfig {
  Topology topology{};
  Schedule schedule = Schedule::kOneShot;
  Variant variant = Variant::kRight;
  uint32_t tiles = 2;
  uint32_t calls = 5;
  uint64_t most_states = 200'000'000;
};

struct ExploreResult {
  uint64_t states = 0;
  uint64_t transitions = 0;
  uint32_t longest = 0;            // steps of the longest path walked
  bool complete = false;           // every reachable state was visited
  std::string violation;           // empty, or what went wrong
  std::vector<std::string> trace;  // the steps that lead there
};

ExploreResult explore(const ExploreConfig& config);

}  // namespace sm120::host
