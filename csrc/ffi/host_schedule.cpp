// SPDX-License-Identifier: Apache-2.0
// Schedules and slab layouts as data for Python.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>

#include <array>
#include <map>

#include "core/layout.h"
#include "ffi/common.h"
#include "host/moves.h"

namespace sm120::ffi {
namespace {

using tvm::ffi::Array;
using tvm::ffi::String;

Plan plan_from(int64_t world, const String& islands, int64_t schedule, int64_t dtype, int64_t codec,
               int64_t partial) {
  Plan plan{};
  plan.topology = topology_from(world, islands);
  if (schedule < 0 || schedule >= kSchedules) {
    TVM_FFI_THROW(ValueError) << "schedule " << schedule << " is outside 0.." << kSchedules - 1;
  }
  plan.schedule = static_cast<Schedule>(schedule);
  plan.dtype = static_cast<Dtype>(dtype);
  plan.codec = static_cast<Codec>(codec);
  plan.partial = static_cast<Codec>(partial);
  plan.ctas = 1;
  return plan;
}

Shape shape_from(int64_t rows, int64_t hidden) {
  if (rows < 0 || hidden <= 0 || hidden % kHiddenUnit != 0) {
    TVM_FFI_THROW(ValueError) << rows << " x " << hidden
                              << ": hidden must be a positive multiple of " << kHiddenUnit;
  }
  return make_shape(static_cast<uint32_t>(rows), static_cast<uint32_t>(hidden));
}

// Rows of [hop, region, source, target, bytes, tiles], one per (hop, region, source, target).
Array<int64_t> schedule_flows(int64_t world, String islands, int64_t schedule, int64_t rows,
                              int64_t hidden, int64_t dtype, int64_t codec, int64_t partial) {
  const Plan plan = plan_from(world, islands, schedule, dtype, codec, partial);
  const Shape shape = shape_from(rows, hidden);
  std::map<std::array<uint32_t, 4>, std::array<int64_t, 2>> flows;
  for (int r = 0; r < plan.topology.world; ++r) {
    const View view = make_view(plan, r);
    for (uint32_t t = 0; t < shape.tiles(); ++t) {
      host::for_each_move(plan, view, shape, t, [&](const host::Move& m) {
        auto& flow = flows[{m.hop, static_cast<uint32_t>(m.region), m.source, m.target}];
        flow[0] += m.bytes;
        flow[1] += 1;
      });
    }
  }
  Array<int64_t> out;
  for (const auto& [key, flow] : flows) {
    for (uint32_t k : key) out.push_back(k);
    for (int64_t f : flow) out.push_back(f);
  }
  return out;
}

// Rows of [hop, region, source, target, tile, bytes], one per store.
Array<int64_t> schedule_moves(int64_t world, String islands, int64_t schedule, int64_t rows,
                              int64_t hidden, int64_t dtype, int64_t codec, int64_t partial) {
  const Plan plan = plan_from(world, islands, schedule, dtype, codec, partial);
  const Shape shape = shape_from(rows, hidden);
  Array<int64_t> out;
  for (int r = 0; r < plan.topology.world; ++r) {
    const View view = make_view(plan, r);
    for (uint32_t t = 0; t < shape.tiles(); ++t) {
      host::for_each_move(plan, view, shape, t, [&](const host::Move& m) {
        for (int64_t v : {static_cast<int64_t>(m.hop), static_cast<int64_t>(m.region),
                          static_cast<int64_t>(m.source), static_cast<int64_t>(m.target),
                          static_cast<int64_t>(m.tile), static_cast<int64_t>(m.bytes)}) {
          out.push_back(v);
        }
      });
    }
  }
  return out;
}

// [hops, most ranks that one rank stores to, islands, island of rank 0, 1, ...]
Array<int64_t> schedule_facts(int64_t world, String islands, int64_t schedule) {
  const Plan plan = plan_from(world, islands, schedule, 0, 0, 0);
  int64_t peers = 0;
  while (!within_peer_limit(plan, static_cast<int>(peers))) ++peers;
  Array<int64_t> out{static_cast<int64_t>(host::total_hops(make_view(plan, 0))), peers,
                     static_cast<int64_t>(plan.topology.islands)};
  for (int r = 0; r < plan.topology.world; ++r) out.push_back(plan.topology.island_of[r]);
  return out;
}

// [slab bytes, control page, slots, slot bytes, reduce, cross, gather bytes] for the given
// capacities.
Array<int64_t> slab_layout(int64_t world, String islands, int64_t capacity, int64_t small) {
  const Layout l = make_layout(topology_from(world, islands), static_cast<uint64_t>(capacity),
                               static_cast<uint64_t>(small));
  return {static_cast<int64_t>(l.slab_bytes), static_cast<int64_t>(kControlBytes),
          static_cast<int64_t>(kSlots),       static_cast<int64_t>(l.slot_bytes),
          static_cast<int64_t>(l.bytes[0]),   static_cast<int64_t>(l.bytes[1]),
          static_cast<int64_t>(l.bytes[2])};
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(schedule_flows, schedule_flows);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(schedule_moves, schedule_moves);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(schedule_facts, schedule_facts);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(slab_layout, slab_layout);

}  // namespace sm120::ffi
