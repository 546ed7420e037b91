// SPDX-License-Identifier: Apache-2.0
// What the relay kernel is given besides Params.
#pragma once

#include "../core/relay.h"
#include "params.h"

namespace sm120 {

inline constexpr uint32_t kRelayThreads = 512;  // of the largest CTA, with the signalling warp

struct RelayParams {
  uint32_t data;        // offset of slot 0's tiles in a slab
  uint32_t flags;       // and of its flags
  uint32_t slot_bytes;  // of a relay slot
  RelayShare share;
  uint64_t* tickets;  // [kMaxCtas]: relay calls ended, as each CTA knows it
};

}  // namespace sm120
