// SPDX-License-Identifier: Apache-2.0
#include "host/world.h"

#include <algorithm>

namespace sm120::host {

World::World(const WorldConfig& config)
    : config_(config),
      layout_(make_layout(config.topology, config.capacity, config.small)),
      random_(config.seed) {
  const int world = config.topology.world;
  memory_.reset(new uint8_t[layout_.slab_bytes * world + kAlign]);
  auto base = reinterpret_cast<uintptr_t>(memory_.get());
  base = round_up<uintptr_t>(base, kAlign);
  for (int r = 0; r < world; ++r) {
    slabs_[r] = reinterpret_cast<uint8_t*>(base) + layout_.slab_bytes * r;
  }
  if (config.fabric) {
    fabric_ = std::make_unique<Fabric>(*config.fabric, world, slabs_);
    for (const EdgeFault& fault : config.faults) fabric_->add_fault(fault);
  }
  for (int r = 0; r < world; ++r) {
    engines_.push_back(std::make_unique<Engine>(r, 0, config.topology, layout_, slabs_,
                                                static_cast<Link*>(fabric_.get())));
    engines_.back()->initialise();
  }
  progress_.resize(world);
}

Args World::args_for(const WorldCall& call, int rank, uint64_t index) const {
  const uint64_t element = dtype_bytes(call.plan.dtype);
  const uint64_t part = static_cast<uint64_t>(call.stride_rows) * call.hidden * rank;
  auto at = [&](auto* base, uint64_t bytes) { return base == nullptr ? nullptr : base + bytes; };
  Args args;
  args.op = call.op;
  args.dtype = call.plan.dtype;
  args.shape = make_shape(call.rows[rank], call.hidden);
  args.total_rows = call.rows[rank];
  args.call = index;
  args.x = at(call.x, part * element);
  args.residual = call.residual;
  args.weight = call.weight;
  args.weight_f32 = call.weight_f32;
  args.gemma = call.gemma;
  args.eps = call.eps;
  args.out = at(call.out, part * element);
  args.residual_out = at(call.residual_out, part * element);
  args.codes = at(call.codes, part);
  args.scales = at(call.scales, static_cast<uint64_t>(call.stride_rows) * rank);
  return args;
}

// One step of one rank: start its next call, or move one of its CTAs by one tile. False: nothing to
// do.
bool World::step(const std::vector<WorldCall>& calls, int rank) {
  Progress& p = progress_[rank];
  Engine& engine = *engines_[rank];
  if (rank == config_.victim && p.inside && calls_before_ + p.call == config_.victim_call &&
      p.steps >= config_.victim_steps) {
    return false;
  }
  if (now_ < p.resume_at) return false;
  if (p.inside && config_.longest_stall_ns != 0 && random_() % 256 == 0) {
    // Between any two steps, such as the last push and the clearing.
    p.resume_at = now_ + random_() % config_.longest_stall_ns;
    return false;
  }
  if (!p.inside) {
    if (p.call == calls.size()) return false;
    const WorldCall& call = calls[p.call];
    engine.begin(call.plan, args_for(call, rank, calls_before_ + p.call));
    p.inside = true;
    p.steps = 0;
    p.moved_at = now_;
    p.done.assign(engine.ctas(), false);
    return true;
  }
  const auto ctas = static_cast<uint32_t>(p.done.size());
  const auto first = static_cast<uint32_t>(random_() % ctas);
  bool all_done = true;
  bool moved = false;
  for (uint32_t i = 0; i < ctas && !moved; ++i) {
    const uint32_t c = (first + i) % ctas;
    if (p.done[c]) continue;
    const Status status = engine.cta(c).advance(true);
    p.done[c] = status == Status::kDone;
    moved = status != Status::kStalled;
  }
  for (bool done : p.done) all_done &= done;
  if (moved) {
    ++p.steps;
    p.moved_at = now_;
  }
  if (all_done) {
    engine.end();
    p.inside = false;
    ++p.call;
    if (config_.longest_stall_ns != 0 && random_() % 4 == 0) {
      p.resume_at = now_ + random_() % config_.longest_stall_ns;
    }
    return true;
  }
  return moved;
}

void World::look(int rank, std::string& failure) {
  Progress& p = progress_[rank];
  Engine& engine = *engines_[rank];
  if (!p.inside || p.ended) return;
  const uint32_t stuck = engine.stuck_cta();
  const uint64_t waited = now_ - p.moved_at;
  uint32_t dead = 0;
  if (config_.death_seen && config_.victim >= 0) {
    const Progress& v = progress_[config_.victim];
    // The system tells later than the last store takes to land.
    if (v.inside && calls_before_ + v.call == config_.victim_call &&
        v.steps >= config_.victim_steps && now_ > v.moved_at + 100'000) {
      dead = 1u << config_.victim;
    }
  }
  Failure found = engine.check();
  if (found.why == Abort::kNone) {
    found = engine.check_wait(engine.cta(stuck), waited, config_.timeout_ns, dead, 0);
  }
  if (found.why == Abort::kNone) return;
  engine.fail(found, engine.cta(stuck), waited);
  failure = found.text;
  p.ended = true;
}

std::vector<std::string> World::run_stepped(const std::vector<WorldCall>& calls) {
  const int world = config_.topology.world;
  std::vector<std::string> failures(world);
  for (Progress& p : progress_) p = Progress{};
  auto finished = [&](int r) {
    const Progress& p = progress_[r];
    return p.ended || (!p.inside && p.call == calls.size());
  };
  int idle = 0;
  while (true) {
    const auto rank = static_cast<int>(random_() % world);
    ++steps_;
    now_ += 10 + random_() % 40;
    uint64_t next = fabric_ ? fabric_->advance(now_) : ~uint64_t{0};
    if (!progress_[rank].ended && step(calls, rank)) {
      idle = 0;
      continue;
    }
    if (++idle < 2 * world) continue;
    // Perhaps nobody can move: try each, then let the clock jump to whatever happens next.
    bool moved = false;
    bool all_finished = true;
    for (int r = 0; r < world; ++r) {
      if (!finished(r)) all_finished = false;
      if (!progress_[r].ended) moved |= step(calls, r);
    }
    idle = 0;
    if (all_finished) break;
    if (moved) continue;
    for (int r = 0; r < world; ++r) {
      const Progress& p = progress_[r];
      if (p.call < calls.size() && p.resume_at > now_) {
        next = std::min(next, p.resume_at);
      }
    }
    for (int r = 0; r < world; ++r) {
      // The victim itself sees nothing any more.
      const bool stopped = r == config_.victim && progress_[r].inside &&
                           calls_before_ + progress_[r].call == config_.victim_call &&
                           progress_[r].steps >= config_.victim_steps;
      if (stopped) {
        progress_[r].ended = true;
        failures[r] = "stopped";
      } else {
        look(r, failures[r]);
      }
    }
    now_ = std::max(now_, std::min(next, now_ + config_.timeout_ns / 50));
  }
  calls_before_ += calls.size();
  return failures;
}

std::vector<uint64_t> World::edge_bytes() const {
  const int world = config_.topology.world;
  std::vector<uint64_t> bytes(static_cast<size_t>(world) * world);
  for (int s = 0; s < world; ++s) {
    for (int t = 0; t < world; ++t) bytes[s * world + t] = engines_[s]->payload_bytes()[t];
  }
  return bytes;
}

}  // namespace sm120::host
