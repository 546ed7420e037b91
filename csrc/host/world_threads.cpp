// SPDX-License-Identifier: Apache-2.0
// The world as real threads: one per CTA of every rank, and one that moves the fabric's stores.
#include <atomic>
#include <barrier>
#include <thread>

#include "host/wait.h"
#include "host/world.h"

namespace sm120::host {
namespace {

// A rank's threads share this.
struct Team {
  explicit Team(std::ptrdiff_t size) : barrier(size) {}
  std::barrier<> barrier;
  std::mutex mutex;
  std::atomic<bool> failed{false};
  std::string text;
};

void random_pause(std::mt19937_64& random, uint64_t longest_ns) {
  if (longest_ns == 0 || random() % 4 != 0) return;
  const timespec pause{0, static_cast<long>(random() % longest_ns)};
  nanosleep(&pause, nullptr);
}

}  // namespace

std::vector<std::string> World::run_threads(const std::vector<WorldCall>& calls) {
  const int world = config_.topology.world;
  uint32_t most_ctas = 1;
  for (const WorldCall& call : calls) most_ctas = std::max<uint32_t>(most_ctas, call.plan.ctas);
  std::vector<std::unique_ptr<Team>> teams;
  for (int r = 0; r < world; ++r) teams.push_back(std::make_unique<Team>(most_ctas));

  auto work = [&](int rank, uint32_t c) {
    Engine& engine = *engines_[rank];
    Team& team = *teams[rank];
    std::mt19937_64 random(config_.seed * 1000003 + rank * 64 + c);
    for (size_t k = 0; k < calls.size(); ++k) {
      if (c == 0) {
        random_pause(random, config_.longest_stall_ns);
        engine.begin(calls[k].plan, args_for(calls[k], rank, calls_before_ + k));
      }
      team.barrier.arrive_and_wait();
      uint64_t moved_at = monotonic_ns();
      while (c < engine.ctas() && !team.failed.load(std::memory_order_acquire)) {
        const Status status = engine.cta(c).advance(random() % 2 == 0);
        if (status == Status::kDone) break;
        if (status == Status::kProgress) {
          moved_at = monotonic_ns();
          continue;
        }
        sched_yield();
        const uint64_t waited = monotonic_ns() - moved_at;
        const std::lock_guard lock(team.mutex);
        if (team.failed.load(std::memory_order_relaxed)) break;
        Failure failure = engine.check();
        if (failure.why == Abort::kNone) {
          failure = engine.check_wait(engine.cta(c), waited, config_.timeout_ns, 0, 0);
        }
        if (failure.why != Abort::kNone) {
          engine.fail(failure, engine.cta(c), waited);
          team.text = failure.text;
          team.failed.store(true, std::memory_order_release);
        }
      }
      team.barrier.arrive_and_wait();
      if (team.failed.load(std::memory_order_acquire)) return;
      if (c == 0) engine.end();
    }
  };

  std::atomic<bool> finished{false};
  std::thread relay;
  if (fabric_) {
    relay = std::thread([&] {
      const uint64_t begin = monotonic_ns();
      while (!finished.load(std::memory_order_acquire)) {
        fabric_->advance(monotonic_ns() - begin + now_);
        sched_yield();
      }
    });
  }
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    for (uint32_t c = 0; c < most_ctas; ++c) threads.emplace_back(work, r, c);
  }
  for (std::thread& thread : threads) thread.join();
  finished.store(true, std::memory_order_release);
  if (relay.joinable()) relay.join();
  calls_before_ += calls.size();
  std::vector<std::string> failures(world);
  for (int r = 0; r < world; ++r) failures[r] = teams[r]->text;
  return failures;
}

}  // namespace sm120::host
