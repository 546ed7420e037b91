// SPDX-License-Identifier: Apache-2.0
// The protocol's test rigs for Python: worlds of ranks in one process, and the soak.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/function.h>

#include "ffi/common.h"
#include "host/soak.h"

namespace sm120::ffi {
namespace {

using tvm::ffi::Array;
using tvm::ffi::Map;
using tvm::ffi::String;
using tvm::ffi::TensorView;
using Settings = Map<String, int64_t>;

struct Rig {
  host::World world;
  std::vector<host::WorldCall> calls;
};

Rig& rig_of(int64_t handle) { return *reinterpret_cast<Rig*>(handle); }

int64_t get(const Settings& settings, const char* key, int64_t otherwise) {
  const auto found = settings.find(String(key));
  return found == settings.end() ? otherwise : (*found).second;
}
uint64_t get_u(const Settings& settings, const char* key, uint64_t otherwise) {
  return static_cast<uint64_t>(get(settings, key, static_cast<int64_t>(otherwise)));
}

host::WorldConfig world_config(const Settings& s, const String& islands,
                               const Array<Array<int64_t>>& faults) {
  host::WorldConfig config;
  config.topology = topology_from(get(s, "world", 2), islands);
  config.capacity = get_u(s, "capacity", 1 << 20);
  config.small = get_u(s, "small", config.capacity);
  config.seed = get_u(s, "seed", 0);
  config.timeout_ns = get_u(s, "timeout_ns", config.timeout_ns);
  config.longest_stall_ns = get_u(s, "longest_stall_ns", 0);
  config.victim = static_cast<int>(get(s, "victim", -1));
  config.victim_call = get_u(s, "victim_call", 0);
  config.victim_steps = get_u(s, "victim_steps", 0);
  config.death_seen = get(s, "death_seen", 0) != 0;
  if (get(s, "fabric", 0) != 0) {
    host::FabricConfig fabric;
    fabric.seed = config.seed + 1;
    fabric.delay_ns = get_u(s, "delay_ns", fabric.delay_ns);
    fabric.jitter_ns = get_u(s, "jitter_ns", 0);
    fabric.bytes_per_us = get_u(s, "bytes_per_us", 0);
    fabric.tear = static_cast<uint32_t>(get(s, "tear", 0));
    fabric.shuffle = get(s, "shuffle", 0) != 0;
    config.fabric = fabric;
  }
  for (const Array<int64_t>& f : faults) {
    config.faults.push_back({static_cast<int>(f[0]), static_cast<int>(f[1]),
                             static_cast<uint64_t>(f[2]), static_cast<uint64_t>(f[3])});
  }
  return config;
}

// `faults`: rows of [source, target, extra delay in ns, stores after which all are lost].
int64_t world_new(Settings settings, String islands, Array<Array<int64_t>> faults) {
  return reinterpret_cast<int64_t>(
      new Rig{host::World(world_config(settings, islands, faults)), {}});
}
void world_free(int64_t handle) { delete &rig_of(handle); }

uint8_t* bytes_or_null(const TensorView& tensor) {
  return tensor.numel() == 0 ? nullptr : static_cast<uint8_t*>(data(tensor));
}

// Adds a call to the program. x, out, residual_out, codes: [world, rows, hidden]; scales: [world,
// rows]; residual: [rows, hidden]; weight: [hidden]; unused ones are empty. The caller keeps them
// alive.
void world_add(int64_t handle, Settings s, String islands, Array<int64_t> rows, double eps,
               TensorView x, TensorView residual, TensorView weight, TensorView out,
               TensorView residual_out, TensorView codes, TensorView scales) {
  host::WorldCall call;
  call.plan.topology = topology_from(x.size(0), islands);
  call.plan.schedule = static_cast<Schedule>(get(s, "schedule", 0));
  call.plan.dtype = dtype_from(x.dtype());
  call.plan.codec =
      static_cast<Codec>(get(s, "codec", static_cast<int64_t>(lossless(call.plan.dtype))));
  call.plan.partial = static_cast<Codec>(get(s, "partial", static_cast<int64_t>(call.plan.codec)));
  call.plan.ctas = static_cast<uint16_t>(get(s, "ctas", 1));
  call.op = static_cast<Op>(get(s, "op", 0));
  call.gemma = get(s, "gemma", 0) != 0;
  call.eps = static_cast<float>(eps);
  call.hidden = static_cast<uint32_t>(x.size(2));
  call.stride_rows = static_cast<uint32_t>(x.size(1));
  for (int64_t r : rows) call.rows.push_back(static_cast<uint32_t>(r));
  call.x = bytes_or_null(x);
  call.residual = bytes_or_null(residual);
  call.weight = bytes_or_null(weight);
  call.weight_f32 = weight.numel() != 0 && dtype_from(weight.dtype()) == Dtype::kF32;
  call.out = bytes_or_null(out);
  call.residual_out = bytes_or_null(residual_out);
  call.codes = bytes_or_null(codes);
  call.scales = reinterpret_cast<float*>(bytes_or_null(scales));
  rig_of(handle).calls.push_back(call);
}

// Runs the program and empties it. Returns the failure text of each rank, empty where all went
// well.
Array<String> world_run(int64_t handle, bool threads) {
  Rig& rig = rig_of(handle);
  const std::vector<std::string> failures =
      threads ? rig.world.run_threads(rig.calls) : rig.world.run_stepped(rig.calls);
  rig.calls.clear();
  Array<String> out;
  for (const std::string& text : failures) out.push_back(String(text));
  return out;
}

Array<int64_t> world_edge_bytes(int64_t handle) {
  Array<int64_t> out;
  for (uint64_t bytes : rig_of(handle).world.edge_bytes()) {
    out.push_back(static_cast<int64_t>(bytes));
  }
  return out;
}

// Virtual nanoseconds since the world began.
int64_t world_now_ns(int64_t handle) { return static_cast<int64_t>(rig_of(handle).world.now_ns()); }

// [valid, rank, phase, tile, source, call, waited ns] of each rank's flight record.
Array<int64_t> world_flight(int64_t handle, int64_t rank) {
  const FlightRecord& f = rig_of(handle).world.engine(static_cast<int>(rank)).page()->flight;
  return {f.valid,
          f.rank,
          f.phase,
          f.tile,
          f.source,
          static_cast<int64_t>(f.call),
          static_cast<int64_t>(f.waited_ns)};
}

int64_t world_soak(Settings settings, String islands, int64_t calls, bool threads) {
  host::SoakConfig config;
  config.world = world_config(settings, islands, {});
  config.calls = static_cast<uint64_t>(calls);
  config.seed = config.world.seed;
  config.threads = threads;
  config.most_rows = static_cast<uint32_t>(get(settings, "most_rows", config.most_rows));
  config.most_hidden = static_cast<uint32_t>(get(settings, "most_hidden", config.most_hidden));
  return static_cast<int64_t>(host::soak(config));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(world_new, world_new);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(world_free, world_free);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(world_add, world_add);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(world_run, world_run);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(world_edge_bytes, world_edge_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(world_now_ns, world_now_ns);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(world_flight, world_flight);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(world_soak, world_soak);

}  // namespace sm120::ffi
