// SPDX-License-Identifier: Apache-2.0
// One rank of a group of processes: shape to plan, large calls in pieces, blocking and bounded.
#pragma once

#include <atomic>
#include <memory>
#include <stdexcept>

#include "host/engine.h"
#include "host/segment.h"

namespace sm120::host {

// The sentence of a Failure, on its way to the caller.
class CollectiveFailure : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Largest messages, in bytes, that go one-shot when the schedule is chosen by shape.
inline constexpr uint64_t kOneShotPair = 1 << 20;
inline constexpr uint64_t kOneShotMany = 16 << 10;
// Largest piece of a call where one-shot or island two-hop was asked for and the world is above 2:
// their inboxes hold `world` messages.
inline constexpr uint64_t kSmallMany = 256 << 10;

struct GroupConfig {
  std::string session;
  int rank = 0;
  Topology topology{};
  int channels = 1;
  uint64_t capacity = 0;  // bytes of the largest piece of a call
  uint64_t timeout_ms = 0;
  uint64_t join_timeout_ms = 0;
  int schedule = -1;  // a Schedule, or -1 to choose by shape
  bool int8 = false;
  bool fp32_partials = false;
  uint16_t ctas = 1;
};

class Group {
 public:
  explicit Group(const GroupConfig& config);

  // Run a call on a channel and return when its outputs are written. Throws CollectiveFailure.
  void run(int channel, Args args);
  void close(int channel);
  void set_timeout_ms(uint64_t timeout_ms) { config_.timeout_ms = timeout_ms; }

  // The plan of a call; a pure function of shape and configuration, equal on every rank.
  Plan plan(const Shape& shape, Dtype dtype) const;
  // Rows that travel at once; 0 when not even one row fits.
  uint32_t rows_at_once(uint32_t hidden, Dtype dtype) const;
  bool admits(uint32_t hidden, Dtype dtype) const { return rows_at_once(hidden, dtype) > 0; }

  const GroupConfig& config() const { return config_; }
  const Layout& layout() const { return layout_; }
  const Engine& engine(int channel) const { return *channels_[channel]->engine; }

  // Fault injection for tests: this process kills itself in call `call` when it reaches `phase`
  // (0 before its record, 1 after it, 2 amid its pushes, 3 after them, 4 amid the waits, 5 at the
  // end).
  void kill_self_at(uint64_t call, int phase) {
    kill_call_ = call;
    kill_phase_ = phase;
  }

 private:
  struct Channel {
    std::unique_ptr<Engine> engine;
    uint64_t calls = 0;
    bool closed = false;
  };
  void run_piece(Channel& channel, int index, const Args& args);
  void reach(uint64_t call, int phase) const;

  GroupConfig config_;
  Layout layout_;
  std::unique_ptr<Segment> segment_;
  std::vector<std::unique_ptr<Channel>> channels_;
  bool crowded_;
  uint64_t kill_call_ = 0;
  int kill_phase_ = -1;
};

}  // namespace sm120::host
