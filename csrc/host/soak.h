// SPDX-License-Identifier: Apache-2.0
// Many calls of random shape, dtype, schedule and CTA count on one world, each checked bit for bit
// against the scalar canonical sum.
#pragma once

#include "host/world.h"

namespace sm120::host {

struct SoakConfig {
  WorldConfig world;
  uint64_t calls = 0;
  uint64_t seed = 0;
  bool threads = false;
  uint32_t most_rows = 3;
  uint32_t most_hidden = 520;
};

// Returns the calls that were checked. Throws std::runtime_error with the seed and call of a
// failure.
uint64_t soak(const SoakConfig& config);

}  // namespace sm120::host
