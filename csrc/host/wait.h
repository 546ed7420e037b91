// SPDX-License-Identifier: Apache-2.0
// Waiting for a store by another rank: spin a little, then sleep until the sender rings.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

#include "core/layout.h"

namespace sm120::host {

inline uint64_t monotonic_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

// Wake the rank that sleeps on this page.
inline void ring(ControlPage* page) {
  __atomic_fetch_add(&page->doorbell, 1u, __ATOMIC_RELEASE);
  syscall(SYS_futex, &page->doorbell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// A sleeping rank is run again as soon as its data is there; one that spins or yields on a machine
// with more work than cores waits for others' time slices. So the spin is short.
class Sleeper {
 public:
  // `crowded`: more ranks than cores, so spinning only keeps the awaited rank from running.
  Sleeper(ControlPage* page, bool crowded) : page_(page), spins_(crowded ? 0 : kSpins) {}
  ~Sleeper() { disarm(); }
  Sleeper(const Sleeper&) = delete;
  Sleeper& operator=(const Sleeper&) = delete;

  // Something arrived.
  void reset() {
    disarm();
    round_ = 0;
    since_ = 0;
  }

  // Call when a poll found nothing, then poll again. Returns nanoseconds waited so far, 0 while
  // spinning.
  uint64_t pause() {
    if (round_ < spins_) {
      ++round_;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
      return 0;
    }
    if (since_ == 0) since_ = monotonic_ns();
    if (!armed_) {
      arm();
      return 0;
    }
    const timespec longest{0, kNapNs};
    syscall(SYS_futex, &page_->doorbell, FUTEX_WAIT, seen_, &longest, nullptr, 0);
    disarm();
    return monotonic_ns() - since_ + 1;
  }

 private:
  void arm() {
    seen_ = __atomic_load_n(&page_->doorbell, __ATOMIC_ACQUIRE);
    __atomic_store_n(&page_->sleeping, 1u, __ATOMIC_RELAXED);
    std::atomic_thread_fence(std::memory_order_seq_cst);
    armed_ = true;
  }
  void disarm() {
    if (armed_) __atomic_store_n(&page_->sleeping, 0u, __ATOMIC_RELAXED);
    armed_ = false;
  }

  static constexpr uint32_t kSpins = 400;    // about 20 us
  static constexpr long kNapNs = 2'000'000;  // then look for aborts and dead ranks
  ControlPage* page_;
  uint32_t spins_;
  uint32_t round_ = 0;
  uint32_t seen_ = 0;
  uint64_t since_ = 0;
  bool armed_ = false;
};

}  // namespace sm120::host
