// SPDX-License-Identifier: Apache-2.0
// Waiting without burning a core for ever: spin, then yield, then sleep.
#pragma once

#include <sched.h>
#include <time.h>

#include <cstdint>

namespace sm120::host {

inline uint64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

class Backoff {
 public:
  // `crowded`: more ranks than cores, so spinning only keeps the awaited rank from running.
  explicit Backoff(bool crowded) : spins_(crowded ? 0 : kSpins) {}

  void reset() {
    round_ = 0;
    since_ = 0;
  }

  // One pause. Returns nanoseconds waited so far, or 0 while still spinning (no clock is read
  // then).
  uint64_t pause() {
    if (round_ < spins_) {
      ++round_;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      return 0;
    }
    const uint64_t now = monotonic_ns();
    if (since_ == 0) since_ = now;
    const uint64_t waited = now - since_;
    if (waited < kYieldNs) {
      sched_yield();
    } else {
      const timespec nap{0, waited < kLongNs ? kNapNs : kLongNapNs};
      nanosleep(&nap, nullptr);
    }
    return waited + 1;
  }

 private:
  static constexpr uint32_t kSpins = 2000;          // about 50 us
  static constexpr uint64_t kYieldNs = 3'000'000;   // then give the core away, but stay runnable
  static constexpr long kNapNs = 50'000;            // then sleep
  static constexpr uint64_t kLongNs = 200'000'000;  // a peer this late is not about to arrive
  static constexpr long kLongNapNs = 1'000'000;
  uint32_t spins_;
  uint32_t round_ = 0;
  uint64_t since_ = 0;
};

}  // namespace sm120::host
