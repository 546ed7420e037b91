// SPDX-License-Identifier: Apache-2.0
// A schedule written out: every store of a call, in hops. Reads the functions the engines run.
#pragma once

#include "core/schedule.h"

namespace sm120::host {

struct Move {
  uint32_t hop;  // a store of hop h needs data that hop h - 1 brought
  Region region;
  uint32_t source;
  uint32_t target;
  uint32_t tile;
  uint32_t bytes;
};

// Hops that partials take between islands.
inline uint32_t cross_hops(const View& view) {
  return !view.cross ? 0 : view.ring() ? view.topology.islands - 1u : 1u;
}
inline uint32_t total_hops(const View& view) {
  return 1 + cross_hops(view) + (view.gather ? 1 : 0);
}

// Calls visit(Move) for every store that `rank` makes for `tile`.
template <class Visit>
void for_each_move(const Plan& plan, const View& view, const Shape& shape, uint32_t tile,
                   Visit visit) {
  const uint32_t length = span_of(shape, tile).length;
  const uint32_t bytes = wire_bytes(plan.codec, length);
  const uint32_t partial = wire_bytes(plan.partial, length);
  auto emit = [&](uint32_t hop, const Push& push, uint32_t count) {
    visit(Move{hop, push.region, view.rank, push.dst, tile, count});
  };
  for (uint32_t i = 0; i < view.scatter_fanout(tile); ++i) {
    emit(0, view.scatter_push(tile, i), bytes);
  }
  const uint32_t islands = view.topology.islands;
  for (uint32_t i = 0; i < view.cross_fanout(tile); ++i) {
    emit(1, view.cross_push(tile, i), partial);
  }
  if (view.ring() && view.reduces(tile)) {
    // The partial of the island d steps back arrives in hop d and leaves in hop d + 1.
    for (uint32_t d = 1; d < islands; ++d) {
      const uint32_t from = (view.island + islands - d) % islands;
      if (view.ring_forwards(from)) emit(d + 1, view.ring_push(tile, from), partial);
    }
  }
  for (uint32_t i = 0; i < view.gather_fanout(tile); ++i) {
    emit(1 + cross_hops(view), view.gather_push(tile, i), bytes);
  }
}

}  // namespace sm120::host
