// SPDX-License-Identifier: Apache-2.0
#include "host/explore_relay.h"

#include <algorithm>
#include <functional>
#include <stdexcept>

#include "host/explore_walk.h"

namespace sm120::host {
namespace {

constexpr int kMostLanes = 256;  // over all ranks and slots
constexpr int kMostCtas = 8;
constexpr int kMostFlying = 4;  // undelivered stores to one lane

enum class Kind : uint8_t { kStore, kFence, kFlag, kWait, kRead };

// A step of a CTA on lanes numbered within a slot, over all ranks.
struct Step {
  Kind kind;
  std::vector<uint16_t> lanes;
  std::string text;
};

struct Lane {
  uint8_t value;  // 0 is what memory begins with, else call + 1
  uint8_t flying;
  uint8_t queue[kMostFlying];
};

struct State {
  uint8_t call[kMaxWorld];
  uint8_t step[kMostCtas];
  Lane lanes[kMostLanes];
};

class RelayExplorer {
 public:
  explicit RelayExplorer(const RelayExploreConfig& config) : config_(config) { build(); }
  ExploreResult run() { return walk(*this, config_.most_states); }

 private:
  template <class Model>
  friend ExploreResult host::walk(Model& model, uint64_t most_states);
  struct Frame {
    State state;
    std::string text;
  };
  using Then = std::function<void(const State&)>;

  void build();
  std::vector<Step> program(uint32_t rank, uint32_t cta, uint32_t count, Schedule schedule) const;
  const std::vector<Step>& steps(uint32_t cta, uint32_t call) const {
    return steps_[call / 2 % 2][cta];
  }
  uint16_t flag(uint32_t rank, uint32_t row, RelayFlag which) const {
    return static_cast<uint16_t>(data_lanes_ + (rank * config_.rows + row) * 2 +
                                 static_cast<uint32_t>(which));
  }
  std::vector<uint16_t> tile(uint32_t rank, uint32_t row, uint32_t t) const {
    const uint32_t cell = (rank * config_.rows + row) * tiles_ + t;
    return {static_cast<uint16_t>(cell * 2), static_cast<uint16_t>(cell * 2 + 1)};
  }
  Lane& lane(State& s, uint32_t call, uint16_t index) const {
    const uint32_t slot =
        config_.variant == RelayVariant::kOneSlot ? 0 : relay_slot(uint64_t{call} + 1);
    return s.lanes[slot * slot_lanes_ + index];
  }
  // What a flag of a call holds.
  uint8_t ticket(uint32_t call) const {
    if (config_.variant == RelayVariant::kBareFlag) return 1;
    if (config_.variant == RelayVariant::kShortCount) return static_cast<uint8_t>(call / 2 % 2 + 1);
    return static_cast<uint8_t>(call + 1);
  }
  bool deliver(Lane& l) const;
  void choices(State state, const std::vector<uint16_t>& lanes, uint32_t call, size_t index,
               const Then& then) const;
  bool finished(const State& state) const;
  void successors(const State& state, std::vector<Frame>& out);
  void take_step(const State& state, uint32_t cta, std::vector<Frame>& out);
  Key key_of(const State& s) const;

  RelayExploreConfig config_;
  uint32_t tiles_ = 1;
  uint32_t data_lanes_ = 0, slot_lanes_ = 0;
  std::vector<std::vector<Step>>
      steps_[2];  // per CTA, rank by rank: of calls with all rows, with one
  std::string violation_, violation_step_;
};

void RelayExplorer::build() {
  const uint32_t slots = config_.variant == RelayVariant::kOneSlot ? 1 : kRelaySlots;
  const bool two_shot = config_.schedule == kRelayTwoShot || config_.second == kRelayTwoShot;
  tiles_ = two_shot ? config_.world : 1;
  data_lanes_ = config_.world * config_.rows * tiles_ * 2;
  slot_lanes_ = data_lanes_ + config_.world * config_.rows * 2;
  if (config_.ctas == 0 || config_.ctas > config_.rows || config_.world < 2 ||
      config_.world * config_.ctas > kMostCtas || slot_lanes_ * slots > kMostLanes) {
    throw std::invalid_argument("too many ranks, rows or CTAs to explore");
  }
  for (uint32_t r = 0; r < config_.world; ++r) {
    for (uint32_t c = 0; c < config_.ctas; ++c) {
      steps_[0].push_back(program(r, c, config_.rows, config_.schedule));
      steps_[1].push_back(program(r, c, 1, config_.second));
    }
  }
}

// The steps of one CTA, in the order of csrc/cuda/relay.cuh: write row j + 1, wait, sum row j,
// signal both, end row j - 1.
std::vector<Step> RelayExplorer::program(uint32_t rank, uint32_t cta, uint32_t count,
                                         Schedule schedule) const {
  const RelayShare share = make_relay_share(schedule, config_.world, rank, tiles_);
  const int rows = static_cast<int>(count), ctas = static_cast<int>(config_.ctas);
  const bool two_shot = share.two_shot != 0;
  std::vector<Step> steps;
  std::vector<uint16_t> own;
  auto add = [&](Kind kind, std::vector<uint16_t> lanes, const std::string& text) {
    if (kind == Kind::kStore) own.insert(own.end(), lanes.begin(), lanes.end());
    if (kind == Kind::kFence) {
      if (config_.variant == RelayVariant::kNoFence) return;
      lanes = own;
    }
    steps.push_back(Step{kind, std::move(lanes), text});
  };
  auto await = [&](int row, RelayFlag which) {
    for (uint32_t d = 1; d < config_.world; ++d) {
      const uint32_t p = (rank + d) % config_.world;
      add(Kind::kWait, {flag(p, row, which)},
          "see the flag of rank " + std::to_string(p) + " row " + std::to_string(row));
    }
  };
  auto read = [&](uint32_t from, int row, uint32_t t) {
    add(Kind::kRead, tile(from, row, t),
        "read tile " + std::to_string(t) + " of row " + std::to_string(row) + " of rank " +
            std::to_string(from));
  };
  auto contribute = [&](int row) {
    std::vector<uint16_t> lanes;
    for (uint32_t k = 0; k < share.sends; ++k) {
      for (uint16_t l : tile(rank, row, share.send(k))) lanes.push_back(l);
    }
    add(Kind::kStore, lanes, "write row " + std::to_string(row));
  };
  const bool early = config_.variant == RelayVariant::kEarlyRead;
  const int end = rows + (two_shot ? 2 : 1) * ctas;
  for (int next = static_cast<int>(cta); cta < count && next < end; next += ctas) {
    const int row = next - ctas, last = row - ctas;
    const bool sums = row >= 0 && row < rows, ends = two_shot && last >= 0;
    std::vector<uint16_t> flags;
    auto store = [&] {
      if (next < rows) contribute(next);
    };
    auto waits = [&] {
      if (sums) await(row, RelayFlag::kContribution);
      if (ends) await(last, RelayFlag::kResult);
    };
    auto sum = [&] {
      for (uint32_t k = 0; sums && k < share.sums; ++k) {
        for (uint32_t d = 1; d < config_.world; ++d) {
          read((rank + d) % config_.world, row, share.sum(k));
        }
        if (two_shot) {
          add(Kind::kStore, tile(rank, row, share.sum(k)),
              "write the sum of row " + std::to_string(row));
        }
      }
    };
    auto signal = [&] {
      if (next < rows) flags.push_back(flag(rank, next, RelayFlag::kContribution));
      if (two_shot && sums) flags.push_back(flag(rank, row, RelayFlag::kResult));
      if (flags.empty()) return;
      if (config_.variant != RelayVariant::kFlagFirst) add(Kind::kFence, {}, "fence");
      for (uint16_t f : flags) add(Kind::kFlag, {f}, "flag");
    };
    if (config_.variant == RelayVariant::kFlagFirst) {
      waits();
      signal();
      store();
      sum();
      if (!flags.empty()) add(Kind::kFence, {}, "fence");
    } else if (early) {
      store();
      sum();
      waits();
      signal();
    } else {
      // The kernel sums before it signals in two-shot steps; in one-shot steps others do both at
      // once.
      store();
      waits();
      if (two_shot) sum();
      signal();
      if (!two_shot) sum();
    }
    for (uint32_t k = 0; ends && k < share.collects; ++k) {
      read(share.owner(share.foreign(k)), last, share.foreign(k));
    }
  }
  return steps;
}

bool RelayExplorer::deliver(Lane& l) const {
  if (l.flying == 0) return false;
  l.value = l.queue[0];
  --l.flying;
  for (int q = 0; q < l.flying; ++q) l.queue[q] = l.queue[q + 1];
  l.queue[l.flying] = 0;
  return true;
}

// Calls `then` for every way in which stores in flight to these lanes may have landed by now.
void RelayExplorer::choices(State state, const std::vector<uint16_t>& lanes, uint32_t call,
                            size_t index, const Then& then) const {
  if (index == lanes.size()) {
    then(state);
    return;
  }
  do {
    choices(state, lanes, call, index + 1, then);
  } while (deliver(lane(state, call, lanes[index])));
}

void RelayExplorer::take_step(const State& state, uint32_t cta, std::vector<Frame>& out) {
  const uint32_t rank = cta / config_.ctas;
  const uint32_t call = state.call[rank];
  const Step& step = steps(cta, call)[state.step[cta]];
  const std::string text =
      "rank " + std::to_string(rank) + " call " + std::to_string(call) + ": " + step.text;
  State next = state;
  ++next.step[cta];
  auto store = [&](uint16_t index, uint8_t value) {
    Lane& l = lane(next, call, index);
    if (l.flying == kMostFlying) throw std::logic_error("explorer: too many stores in flight");
    l.queue[l.flying++] = value;
  };
  switch (step.kind) {
    case Kind::kStore:
      for (uint16_t index : step.lanes) store(index, static_cast<uint8_t>(call + 1));
      out.push_back(Frame{next, text});
      break;
    case Kind::kFlag:
      store(step.lanes[0], ticket(call));
      out.push_back(Frame{next, text});
      break;
    case Kind::kFence:
      for (uint16_t index : step.lanes) {
        while (deliver(lane(next, call, index))) {
        }
      }
      out.push_back(Frame{next, text});
      break;
    case Kind::kWait:
      choices(next, step.lanes, call, 0, [&](const State& seen) {
        State s = seen;
        if (lane(s, call, step.lanes[0]).value == ticket(call)) out.push_back(Frame{s, text});
      });
      break;
    case Kind::kRead:
      choices(next, step.lanes, call, 0, [&](const State& seen) {
        State s = seen;
        const int a = lane(s, call, step.lanes[0]).value, b = lane(s, call, step.lanes[1]).value;
        const int right = static_cast<int>(call) + 1;
        if (a == right && b == right) {
          out.push_back(Frame{s, text});
          return;
        }
        auto named = [](int tag) {
          return tag == 0 ? std::string("no call") : "call " + std::to_string(tag - 1);
        };
        violation_ =
            (a != b ? "torn read: lanes of " + named(a) + " and " + named(b)
                    : (a < right ? "stale read: data of " : "overwritten: data of ") + named(a)) +
            " taken for call " + std::to_string(call);
        violation_step_ = text;
      });
      break;
  }
}

void RelayExplorer::successors(const State& state, std::vector<Frame>& out) {
  for (uint32_t cta = 0; cta < config_.world * config_.ctas && violation_.empty(); ++cta) {
    const uint32_t call = state.call[cta / config_.ctas];
    if (call == config_.calls) continue;
    if (state.step[cta] < steps(cta, call).size()) take_step(state, cta, out);
  }
  // A rank whose CTAs have all ended begins its next call in the same breath.
  for (Frame& frame : out) {
    for (uint32_t rank = 0; rank < config_.world; ++rank) {
      const uint32_t first = rank * config_.ctas;
      bool ended = frame.state.call[rank] < config_.calls;
      for (uint32_t c = first; c < first + config_.ctas; ++c) {
        ended = ended && frame.state.step[c] == steps(c, frame.state.call[rank]).size();
      }
      if (!ended) continue;
      ++frame.state.call[rank];
      for (uint32_t c = first; c < first + config_.ctas; ++c) frame.state.step[c] = 0;
    }
  }
}

Key RelayExplorer::key_of(const State& s) const {
  Key key;
  for (uint32_t r = 0; r < config_.world; ++r) key.mix(s.call[r]);
  for (uint32_t c = 0; c < config_.world * config_.ctas; ++c) key.mix(s.step[c]);
  const uint32_t slots = config_.variant == RelayVariant::kOneSlot ? 1 : kRelaySlots;
  for (uint32_t i = 0; i < slot_lanes_ * slots; ++i) {
    const Lane& l = s.lanes[i];
    uint64_t v = l.value | static_cast<uint64_t>(l.flying) << 8;
    for (int q = 0; q < l.flying; ++q) v |= static_cast<uint64_t>(l.queue[q]) << (16 + 8 * q);
    key.mix(v);
  }
  return key;
}

bool RelayExplorer::finished(const State& state) const {
  bool all = true;
  for (uint32_t r = 0; r < config_.world; ++r) all = all && state.call[r] == config_.calls;
  return all;
}

}  // namespace

ExploreResult explore_relay(const RelayExploreConfig& config) {
  return RelayExplorer(config).run();
}

}  // namespace sm120::host
