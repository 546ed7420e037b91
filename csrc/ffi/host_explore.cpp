// SPDX-License-Identifier: Apache-2.0
// The exhaustive explorer for Python.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>

#include "ffi/common.h"
#include "host/explore.h"

namespace sm120::ffi {
namespace {

using tvm::ffi::Array;
using tvm::ffi::String;

// [states, transitions, longest path, complete (0 or 1), violation or "", then the trace's steps].
Array<String> explore_slots(int64_t world, String islands, int64_t schedule, int64_t variant,
                            int64_t tiles, int64_t calls) {
  host::ExploreConfig config;
  config.topology = topology_from(world, islands);
  config.schedule = static_cast<Schedule>(schedule);
  config.variant = static_cast<host::Variant>(variant);
  config.tiles = static_cast<uint32_t>(tiles);
  config.calls = static_cast<uint32_t>(calls);
  const host::ExploreResult result = host::explore(config);
  Array<String> out{String(std::to_string(result.states)),
                    String(std::to_string(result.transitions)),
                    String(std::to_string(result.longest)),
                    String(std::to_string(result.complete ? 1 : 0)), String(result.violation)};
  for (const std::string& step : result.trace) out.push_back(String(step));
  return out;
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(explore_slots, explore_slots);

}  // namespace sm120::ffi
