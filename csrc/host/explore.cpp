// SPDX-License-Identifier: Apache-2.0
#include "host/explore.h"

#include <algorithm>
#include <functional>
#include <stdexcept>

#include "host/explore_walk.h"

namespace sm120::host {
namespace {

constexpr int kLanes = 2;
constexpr int kMostCells = 128;  // over all ranks and slots
constexpr int kMostCtas = 16;
constexpr int kMostFlying = 3;  // undelivered stores to one lane

// A step of a CTA: wait for cell `poll` (or nothing), then make `stores`; own ones land at once.
// Cells are numbered within a slot, over all ranks.
struct Step {
  int16_t poll = -1;
  std::vector<uint16_t> stores;
  std::vector<uint16_t> own_stores;
  std::string text;
};

struct Lane {
  uint8_t value;  // 0 is empty, else call + 1
  uint8_t flying;
  uint8_t queue[kMostFlying];
};

struct State {
  uint8_t call[kMaxWorld];
  uint8_t step[kMostCtas];
  uint8_t cleared[kMostCtas];
  Lane lanes[kMostCells * kLanes];
};

class Explorer {
 public:
  explicit Explorer(const ExploreConfig& config) : config_(config) { build(); }
  ExploreResult run() { return walk(*this, config_.most_states); }

 private:
  template <class Model>
  friend ExploreResult host::walk(Model& model, uint64_t most_states);
  struct Frame {
    State state;
    std::string text;
  };

  void build();
  uint32_t slots() const { return config_.variant == Variant::kTwoSlots ? 2 : 3; }
  uint32_t slot_used(uint32_t call) const {
    return config_.variant == Variant::kHostEpoch ? call % 2 : call % slots();
  }
  int slot_cleared(uint32_t call) const {
    if (config_.variant == Variant::kNoClear) return -1;
    const uint32_t used = slot_used(call);
    const uint32_t back = config_.variant == Variant::kClearNext ? slots() - 1 : 1;
    return static_cast<int>((used + slots() - back) % slots());
  }
  Lane& lane(State& s, uint32_t slot, uint32_t cell, int i) const {
    return s.lanes[(slot * cells_ + cell) * kLanes + i];
  }
  Key key_of(const State& s) const;
  bool finished(const State& state) const;
  void successors(const State& state, std::vector<Frame>& out);
  void take_step(const State& state, int cta, std::vector<Frame>& out);
  void clear_share(const State& state, int cta, std::vector<Frame>& out);
  void deliver_choices(State state, const std::vector<uint16_t>& cells, uint32_t slot, size_t index,
                       bool must_arrive, const std::function<void(const State&)>& then) const;
  std::string name(int cta, const State& s) const;

  ExploreConfig config_;
  int world_ = 0;
  int ctas_ = 0;
  uint32_t cells_ = 0;                         // per slot, over all ranks
  std::vector<std::vector<Step>> steps_;       // per CTA
  std::vector<std::vector<uint16_t>> shares_;  // cells a CTA clears
  std::string violation_;
  std::string violation_step_;
};

void Explorer::build() {
  world_ = config_.topology.world;
  ctas_ = world_ * static_cast<int>(config_.tiles);
  if (ctas_ > kMostCtas) throw std::invalid_argument("too many ranks and tiles to explore");
  Plan plan{};
  plan.topology = config_.topology;
  plan.schedule = config_.schedule;
  plan.ctas = static_cast<uint16_t>(config_.tiles);
  // Number the cells of every rank's regions one after another.
  std::vector<uint32_t> base(world_ * kRegions + 1, 0);
  for (int r = 0; r < world_; ++r) {
    const View view = make_view(plan, r);
    for (int region = 0; region < kRegions; ++region) {
      const uint32_t extent = view.extent(static_cast<Region>(region), config_.tiles);
      base[r * kRegions + region + 1] = base[r * kRegions + region] + extent;
    }
  }
  cells_ = base.back();
  if (cells_ * slots() > kMostCells) throw std::invalid_argument("too many cells to explore");
  auto cell = [&](int rank, Region region, uint32_t index) {
    return static_cast<uint16_t>(base[rank * kRegions + static_cast<int>(region)] + index);
  };
  auto target = [&](const Push& push) { return cell(push.dst, push.region, push.index); };

  steps_.resize(ctas_);
  shares_.resize(ctas_);
  for (int r = 0; r < world_; ++r) {
    const View view = make_view(plan, r);
    for (uint32_t t = 0; t < config_.tiles; ++t) {
      std::vector<Step>& steps = steps_[r * config_.tiles + t];
      auto poll = [&](Region region, uint32_t index, const std::string& text) {
        steps.push_back(Step{static_cast<int16_t>(cell(r, region, index)), {}, {}, text});
      };
      Step first;
      first.text = "push";
      for (uint32_t i = 0; i < view.scatter_fanout(t); ++i) {
        first.stores.push_back(target(view.scatter_push(t, i)));
      }
      steps.push_back(first);
      if (view.reduces(t)) {
        for (uint32_t i = 0; i < view.sources(); ++i) {
          if (i == view.source) continue;
          poll(Region::kReduce, view.reduce_base(t) + i,
               "read contribution of rank " + std::to_string(view.source_rank(i)));
        }
        for (uint32_t i = 0; i < view.cross_fanout(t); ++i) {
          steps.back().stores.push_back(target(view.cross_push(t, i)));
        }
        if (view.cross) {
          steps.back().own_stores.push_back(
              cell(r, Region::kCross, view.cross_base(t) + view.island));
        }
      }
      if (view.adds_partials(t)) {
        const uint32_t islands = view.topology.islands;
        for (uint32_t d = 1; d <= islands; ++d) {
          const uint32_t from = (view.island + islands - d) % islands;
          if (!view.polls_partial(t, from)) continue;
          poll(Region::kCross, view.cross_base(t) + from,
               "read partial of island " + std::to_string(from));
          if (view.ring_forwards(from)) {
            steps.back().stores.push_back(target(view.ring_push(t, from)));
          }
        }
      }
      for (uint32_t i = 0; i < view.gather_fanout(t); ++i) {
        steps.back().stores.push_back(target(view.gather_push(t, i)));
      }
      if (view.polls_result(t)) poll(Region::kGather, t, "read result");
    }
    // Any CTA may clear any part of its rank's slab: deal the cells round.
    uint32_t dealt = 0;
    for (uint32_t c = base[r * kRegions]; c < base[(r + 1) * kRegions]; ++c) {
      shares_[r * config_.tiles + dealt++ % config_.tiles].push_back(static_cast<uint16_t>(c));
    }
  }
}

Key Explorer::key_of(const State& s) const {
  Key key;
  for (int r = 0; r < world_; ++r) key.mix(s.call[r]);
  for (int c = 0; c < ctas_; ++c) key.mix(s.step[c] * 2u + s.cleared[c]);
  const uint32_t lanes = cells_ * slots() * kLanes;
  for (uint32_t i = 0; i < lanes; ++i) {
    const Lane& l = s.lanes[i];
    uint64_t v = l.value | static_cast<uint64_t>(l.flying) << 8;
    for (int q = 0; q < l.flying; ++q) v |= static_cast<uint64_t>(l.queue[q]) << (16 + 8 * q);
    key.mix(v);
  }
  return key;
}

std::string Explorer::name(int cta, const State& s) const {
  const int rank = cta / static_cast<int>(config_.tiles);
  return "rank " + std::to_string(rank) + " tile " +
         std::to_string(cta % static_cast<int>(config_.tiles)) + " call " +
         std::to_string(s.call[rank]);
}

// Calls `then` for every way in which stores in flight to these cells may have landed by now.
void Explorer::deliver_choices(State state, const std::vector<uint16_t>& cells, uint32_t slot,
                               size_t index, bool must_arrive,
                               const std::function<void(const State&)>& then) const {
  if (index == cells.size() * kLanes) {
    then(state);
    return;
  }
  Lane& l = lane(state, slot, cells[index / kLanes], static_cast<int>(index % kLanes));
  while (true) {
    if (!must_arrive || l.value != 0) {
      deliver_choices(state, cells, slot, index + 1, must_arrive, then);
    }
    if (l.flying == 0) return;
    l.value = l.queue[0];
    --l.flying;
    for (int q = 0; q < l.flying; ++q) l.queue[q] = l.queue[q + 1];
    l.queue[l.flying] = 0;
  }
}

void Explorer::take_step(const State& state, int cta, std::vector<Frame>& out) {
  const int rank = cta / static_cast<int>(config_.tiles);
  const uint32_t call = state.call[rank];
  const uint32_t slot = slot_used(call);
  const Step& step = steps_[cta][state.step[cta]];
  std::vector<uint16_t> polled;
  if (step.poll >= 0) polled.push_back(static_cast<uint16_t>(step.poll));
  deliver_choices(state, polled, slot, 0, true, [&](const State& seen) {
    State next = seen;
    std::string text = name(cta, state) + ": " + step.text;
    if (step.poll >= 0) {
      const uint8_t a = lane(next, slot, polled[0], 0).value;
      const uint8_t b = lane(next, slot, polled[0], 1).value;
      if (a != call + 1 || b != call + 1) {
        violation_ = (a != b ? "torn read: lanes of calls " + std::to_string(a - 1) + " and " +
                                   std::to_string(b - 1)
                             : "stale read: data of call " + std::to_string(a - 1)) +
                     " taken for call " + std::to_string(call);
        violation_step_ = text;
        return;
      }
    }
    for (uint16_t c : step.stores) {
      for (int i = 0; i < kLanes; ++i) {
        Lane& l = lane(next, slot, c, i);
        if (l.flying == kMostFlying) throw std::logic_error("explorer: too many stores in flight");
        l.queue[l.flying++] = static_cast<uint8_t>(call + 1);
      }
    }
    for (uint16_t c : step.own_stores) {
      for (int i = 0; i < kLanes; ++i)
        lane(next, slot, c, i).value = static_cast<uint8_t>(call + 1);
    }
    ++next.step[cta];
    out.push_back(Frame{next, text});
  });
}

void Explorer::clear_share(const State& state, int cta, std::vector<Frame>& out) {
  const int rank = cta / static_cast<int>(config_.tiles);
  const int slot = slot_cleared(state.call[rank]);
  const std::string text = name(cta, state) + ": clear slot " + std::to_string(slot);
  if (slot < 0) {
    State next = state;
    next.cleared[cta] = 1;
    out.push_back(Frame{next, name(cta, state) + ": clear nothing"});
    return;
  }
  deliver_choices(state, shares_[cta], static_cast<uint32_t>(slot), 0, false,
                  [&](const State& seen) {
                    State next = seen;
                    for (uint16_t c : shares_[cta]) {
                      for (int i = 0; i < kLanes; ++i) {
                        lane(next, static_cast<uint32_t>(slot), c, i).value = 0;
                      }
                    }
                    next.cleared[cta] = 1;
                    out.push_back(Frame{next, text});
                  });
}

void Explorer::successors(const State& state, std::vector<Frame>& out) {
  for (int cta = 0; cta < ctas_ && violation_.empty(); ++cta) {
    const int rank = cta / static_cast<int>(config_.tiles);
    if (state.call[rank] == config_.calls) continue;
    if (state.step[cta] < steps_[cta].size()) take_step(state, cta, out);
    if (state.step[cta] > 0 && !state.cleared[cta]) clear_share(state, cta, out);
  }
  // A rank whose CTAs have all ended begins its next call in the same breath: nothing can come
  // between.
  for (Frame& frame : out) {
    for (int rank = 0; rank < world_; ++rank) {
      bool ended = frame.state.call[rank] < config_.calls;
      const int first = rank * static_cast<int>(config_.tiles);
      for (int c = first; c < first + static_cast<int>(config_.tiles); ++c) {
        ended = ended && frame.state.step[c] == steps_[c].size() && frame.state.cleared[c] != 0;
      }
      if (!ended) continue;
      ++frame.state.call[rank];
      for (int c = first; c < first + static_cast<int>(config_.tiles); ++c) {
        frame.state.step[c] = frame.state.cleared[c] = 0;
      }
    }
  }
}

bool Explorer::finished(const State& state) const {
  bool all = true;
  for (int r = 0; r < world_; ++r) all = all && state.call[r] == config_.calls;
  return all;
}

}  // namespace

ExploreResult explore(const ExploreConfig& config) { return Explorer(config).run(); }

}  // namespace sm120::host
