// SPDX-License-Identifier: Apache-2.0
// The exhaustive explorer for Python.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>

#include "ffi/common.h"
#include "host/explore_relay.h"

namespace sm120::ffi {
namespace {

using tvm::ffi::Array;
using tvm::ffi::String;

// [states, transitions, longest path, complete (0 or 1), violation or "", then the trace's steps].
Array<String> told(const host::ExploreResult& result) {
  Array<String> out{String(std::to_string(result.states)),
                    String(std::to_string(result.transitions)),
                    String(std::to_string(result.longest)),
                    String(std::to_string(result.complete ? 1 : 0)), String(result.violation)};
  for (const std::string& step : result.trace) out.push_back(String(step));
  return out;
}

Array<String> explore_slots(int64_t world, String islands, int64_t schedule, int64_t variant,
                            int64_t tiles, int64_t calls) {
  host::ExploreConfig config;
  config.topology = topology_from(world, islands);
  config.schedule = static_cast<Schedule>(schedule);
  config.variant = static_cast<host::Variant>(variant);
  config.tiles = static_cast<uint32_t>(tiles);
  config.calls = static_cast<uint32_t>(calls);
  return told(host::explore(config));
}

// The same of the relay. `schedule` and `second`: 0 one-shot, 1 two-shot.
Array<String> explore_relay(int64_t world, int64_t schedule, int64_t second, int64_t variant,
                            int64_t rows, int64_t ctas, int64_t calls) {
  host::RelayExploreConfig config;
  config.world = static_cast<uint32_t>(world);
  config.schedule = schedule == 0 ? kRelayOneShot : kRelayTwoShot;
  config.second = second == 0 ? kRelayOneShot : kRelayTwoShot;
  config.variant = static_cast<host::RelayVariant>(variant);
  config.rows = static_cast<uint32_t>(rows);
  config.ctas = static_cast<uint32_t>(ctas);
  config.calls = static_cast<uint32_t>(calls);
  return told(host::explore_relay(config));
}

// A rank's part of a row in the relay: tiles it sends, -1, tiles it sums, -1, tiles it collects
// each with its owner.
Array<int64_t> relay_share(int64_t schedule, int64_t world, int64_t rank, int64_t tiles) {
  const RelayShare share =
      make_relay_share(schedule == 0 ? kRelayOneShot : kRelayTwoShot, static_cast<uint32_t>(world),
                       static_cast<uint32_t>(rank), static_cast<uint32_t>(tiles));
  Array<int64_t> out;
  for (uint32_t k = 0; k < share.sends; ++k) out.push_back(share.send(k));
  out.push_back(-1);
  for (uint32_t k = 0; k < share.sums; ++k) out.push_back(share.sum(k));
  out.push_back(-1);
  for (uint32_t k = 0; k < share.collects; ++k) {
    out.push_back(share.foreign(k));
    out.push_back(share.owner(share.foreign(k)));
  }
  return out;
}

// [data bytes of a slot, bytes of a slot, bytes in all, slots], then for every (slot, row): offsets
// of its first tile, its contribution flag and its result flag.
Array<int64_t> relay_layout(int64_t capacity, int64_t rows, int64_t tiles_per_row, int64_t dtype) {
  const RelayLayout layout = make_relay_layout(static_cast<uint64_t>(capacity));
  Array<int64_t> out{static_cast<int64_t>(layout.data_bytes),
                     static_cast<int64_t>(layout.slot_bytes), static_cast<int64_t>(layout.bytes),
                     static_cast<int64_t>(kRelaySlots)};
  for (uint32_t slot = 0; slot < kRelaySlots; ++slot) {
    for (uint32_t row = 0; row < rows; ++row) {
      const uint32_t tile = row * static_cast<uint32_t>(tiles_per_row);
      out.push_back(static_cast<int64_t>(layout.tile(slot, tile, static_cast<Dtype>(dtype))));
      out.push_back(static_cast<int64_t>(layout.flag(slot, row, RelayFlag::kContribution)));
      out.push_back(static_cast<int64_t>(layout.flag(slot, row, RelayFlag::kResult)));
    }
  }
  return out;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(explore_slots, explore_slots);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(explore_relay, explore_relay);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(relay_share, relay_share);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(relay_layout, relay_layout);

}  // namespace sm120::ffi
