// SPDX-License-Identifier: Apache-2.0
// The shared memory of one group of processes: a header, then a slab per channel and rank.
#pragma once

#include <cstdint>
#include <string>

#include "core/layout.h"

namespace sm120::host {

class Segment {
 public:
  // Create (rank 0) or open the segment, map it, fill this rank's slabs through `fill`, and wait
  // until all ranks have. Its name is removed before this returns, so nothing outlives the
  // processes. Throws std::runtime_error naming the ranks that did not come within `timeout_ms`.
  Segment(const std::string& session, int rank, int channels, const Topology& topology,
          const Layout& layout, uint64_t timeout_ms);
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  uint8_t* slab(int channel, int rank) const;

  // Bit r is set when the process of rank r has ended.
  uint32_t dead() const;
  // Bit r is set when rank r has closed this channel.
  uint32_t left(int channel) const;

 private:
  struct Header;
  void create(uint64_t deadline_ns);
  void open(uint64_t deadline_ns);
  void map(int fd);
  void join(uint64_t deadline_ns);
  void watch_peers();
  Header* header() const { return reinterpret_cast<Header*>(base_); }

  std::string name_;
  int rank_;
  int channels_;
  Topology topology_;
  Layout layout_;
  uint8_t* base_ = nullptr;
  uint64_t bytes_ = 0;
  int watch_[kMaxWorld];  // pidfd of each peer, -1 where it cannot be watched
};

}  // namespace sm120::host
