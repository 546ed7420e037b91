// SPDX-License-Identifier: Apache-2.0
#include "host/group.h"

#include <sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "host/wait.h"

namespace sm120::host {
namespace {

int usable_cores() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

uint8_t* advanced(const void* base, uint64_t bytes) {
  return base == nullptr ? nullptr
                         : const_cast<uint8_t*>(static_cast<const uint8_t*>(base)) + bytes;
}

// Marks the channel as busy for the duration of a call; a second thread is refused, not queued,
// because its order against the first would differ from rank to rank.
class Occupied {
 public:
  Occupied(uint32_t* owner, int channel) : owner_(owner) {
    uint32_t expected = 0;
    const auto me = static_cast<uint32_t>(syscall(SYS_gettid));
    if (!__atomic_compare_exchange_n(owner_, &expected, me, false, __ATOMIC_ACQUIRE,
                                     __ATOMIC_RELAXED)) {
      throw CollectiveFailure("channel " + std::to_string(channel) + " is busy: thread " +
                              std::to_string(expected) + " is inside a call and thread " +
                              std::to_string(me) +
                              " started another. Calls on one channel must come one after another, "
                              "in the same order on every rank; use one channel per stream");
    }
  }
  ~Occupied() { __atomic_store_n(owner_, 0u, __ATOMIC_RELEASE); }
  Occupied(const Occupied&) = delete;
  Occupied& operator=(const Occupied&) = delete;

 private:
  uint32_t* owner_;
};

}  // namespace

Group::Group(const GroupConfig& config)
    : config_(config),
      layout_(make_layout(
          config.topology, config.capacity,
          std::min(config.capacity, config.topology.world == 2 ? kOneShotPair : kSmallMany))),
      segment_(std::make_unique<Segment>(config.session, config.rank, config.channels,
                                         config.topology, layout_, config.join_timeout_ms)),
      crowded_(config.topology.world > usable_cores()) {
  for (int c = 0; c < config.channels; ++c) {
    uint8_t* slabs[kMaxWorld];
    for (int r = 0; r < config.topology.world; ++r) slabs[r] = segment_->slab(c, r);
    auto channel = std::make_unique<Channel>();
    channel->engine = std::make_unique<Engine>(config.rank, c, config.topology, layout_, slabs,
                                               static_cast<Link*>(nullptr));
    channels_.push_back(std::move(channel));
  }
}

Plan Group::plan(const Shape& shape, Dtype dtype) const {
  Plan plan{};
  plan.topology = config_.topology;
  plan.dtype = dtype;
  plan.codec = config_.int8 ? Codec::kInt8 : lossless(dtype);
  plan.partial = config_.fp32_partials ? Codec::kF32 : plan.codec;
  plan.ctas = config_.ctas;
  if (config_.schedule >= 0) {
    plan.schedule = static_cast<Schedule>(config_.schedule);
    return plan;
  }
  // In shared memory a hop costs about 1 us and a byte is written once and read once per copy, so
  // few ranks or small messages take the one hop, and the rest share the additions.
  const uint64_t bytes = static_cast<uint64_t>(shape.rows) * shape.hidden * dtype_bytes(dtype);
  const uint64_t one_shot_limit = config_.topology.world == 2 ? kOneShotPair : kOneShotMany;
  plan.schedule = bytes <= one_shot_limit ? Schedule::kOneShot : Schedule::kTwoShot;
  return plan;
}

uint32_t Group::rows_at_once(uint32_t hidden, Dtype dtype) const {
  if (hidden == 0 || hidden % kHiddenUnit != 0 || hidden / kHiddenUnit >= 0xFFFF) return 0;
  const uint64_t row =
      static_cast<uint64_t>(make_shape(1, hidden).tiles_per_row) * kTile * dtype_bytes(dtype);
  const uint64_t limit = config_.schedule < 0
                             ? layout_.capacity
                             : message_limit(layout_, static_cast<Schedule>(config_.schedule));
  return static_cast<uint32_t>(limit / row);
}

void Group::reach(uint64_t call, int phase) const {
  if (phase == kill_phase_ && call == kill_call_) kill(getpid(), SIGKILL);
}

void Group::run(int index, Args args) {
  Channel& channel = *channels_[index];
  if (channel.closed) throw CollectiveFailure("the communicator is closed");
  Occupied occupied(&channel.engine->page()->owner, index);
  if (channel.engine->failure().why != Abort::kNone) {
    throw CollectiveFailure(channel.engine->failure().text);
  }
  const Shape whole = args.shape;
  const uint32_t step = rows_at_once(whole.hidden, args.dtype);
  if (step == 0) throw CollectiveFailure("a row of this call exceeds the communicator's capacity");
  args.total_rows = whole.rows;
  args.call = channel.calls++;
  const uint64_t element = dtype_bytes(args.dtype);
  uint32_t row = 0;
  // A call of no rows still takes part, so that ranks that disagree hear of it.
  do {
    Args piece = args;
    piece.shape = make_shape(std::min(step, whole.rows - row), whole.hidden);
    const uint64_t at = static_cast<uint64_t>(row) * whole.hidden;
    piece.x = advanced(args.x, at * element);
    piece.residual = advanced(args.residual, at * element);
    piece.out = advanced(args.out, at * element);
    piece.residual_out = advanced(args.residual_out, at * element);
    piece.codes = advanced(args.codes, at);
    piece.scales = args.scales == nullptr ? nullptr : args.scales + row;
    run_piece(channel, index, piece);
    row += step;
  } while (row < whole.rows);
}

void Group::run_piece(Channel& channel, int index, const Args& args) {
  constexpr uint64_t kLivenessNs = 2'000'000;  // a system call, so not on every pause
  Engine& engine = *channel.engine;
  reach(args.call, 0);
  engine.begin(plan(args.shape, args.dtype), args);
  reach(args.call, 1);
  Sleeper sleeper(engine.page(), crowded_);
  uint32_t dead = 0;
  uint32_t left = 0;
  uint64_t next_look = kLivenessNs;
  if (kill_phase_ == 2) {
    engine.cta(0).advance(true);
    reach(args.call, 2);
  }
  uint64_t moves = 0;
  while (true) {
    bool moved = false;
    bool done = true;
    for (uint32_t c = 0; c < engine.ctas(); ++c) {
      const Status status = engine.cta(c).advance(false);
      moved |= status == Status::kProgress;
      done &= status == Status::kDone;
    }
    if (moves == 0) reach(args.call, 3);
    if (done) {
      if (moves == 0) reach(args.call, 4);
      // All data was here, but the others may have given up on this rank meanwhile.
      const Failure late = engine.aborted();
      if (late.why == Abort::kNone) break;
      engine.fail(late, engine.cta(0), 0);
      throw CollectiveFailure(late.text);
    }
    if (moved) {
      if (++moves == 1) reach(args.call, 4);
      sleeper.reset();
      next_look = kLivenessNs;
      continue;
    }
    const uint64_t waited = sleeper.pause();
    if (waited == 0) continue;
    const uint32_t stuck = engine.stuck_cta();
    Failure failure = engine.check();
    if (failure.why == Abort::kNone && waited > next_look) {
      next_look = waited + kLivenessNs;
      // Looked at before the data is polled once more, so what a dying rank still stored is used.
      const uint32_t now_dead = segment_->dead();
      const uint32_t now_left = segment_->left(index);
      failure =
          engine.check_wait(engine.cta(stuck), waited, config_.timeout_ms * 1'000'000, dead, left);
      dead = now_dead;
      left = now_left;
    }
    if (failure.why != Abort::kNone) {
      engine.fail(failure, engine.cta(stuck), waited);
      throw CollectiveFailure(failure.text);
    }
  }
  engine.end();
  reach(args.call, 5);
}

void Group::close(int index) {
  Channel& channel = *channels_[index];
  if (channel.closed) return;
  channel.closed = true;
  __atomic_store_n(&channel.engine->page()->left, 1u, __ATOMIC_RELEASE);
}

}  // namespace sm120::host
