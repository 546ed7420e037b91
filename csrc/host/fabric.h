// SPDX-License-Identifier: Apache-2.0
// A software fabric between ranks: stores travel with delay and bandwidth per edge, in order on an
// edge but in any order between edges, possibly torn into pieces, possibly lost. Seeded, so a run
// repeats.
#pragma once

#include <cstdint>
#include <mutex>
#include <queue>
#include <random>
#include <vector>

#include "host/engine.h"

namespace sm120::host {

struct FabricConfig {
  uint64_t seed = 0;
  uint64_t delay_ns = 500;    // shortest way
  uint64_t jitter_ns = 0;     // up to so much more, drawn per piece
  uint64_t bytes_per_us = 0;  // per edge; 0 is unlimited
  uint32_t tear = 0;          // a store arrives in pieces of 2, 4, 8 or 16 bytes; 0: whole
  bool shuffle = false;       // pieces of one store arrive in any order
};

// What an edge does differently from the rest.
struct EdgeFault {
  int source = -1;
  int target = -1;
  uint64_t extra_delay_ns = 0;
  uint64_t lose_after = ~uint64_t{0};  // stores that arrive before all others are lost
};

class Fabric : public Link {
 public:
  Fabric(const FabricConfig& config, int world, uint8_t* const* slabs);

  void add_fault(const EdgeFault& fault);
  void store(int source, int target, uint64_t offset, const void* bytes, uint32_t count) override;
  bool alive(int source, int target) const override;

  // Let time pass: everything due by `now_ns` lands. Returns when the next piece is due, or the
  // maximum.
  uint64_t advance(uint64_t now_ns);

  // Bytes handed to each edge, [source * world + target], call records apart.
  const std::vector<uint64_t>& bytes() const { return bytes_; }

 private:
  static constexpr uint32_t kPiece = 64;
  struct Piece {
    uint64_t due;
    uint64_t order;
    uint64_t offset;
    int target;
    uint32_t count;
    uint8_t bytes[kPiece];
    bool operator>(const Piece& other) const {
      return due != other.due ? due > other.due : order > other.order;
    }
  };
  struct Edge {
    uint64_t free_at = 0;
    uint64_t stores = 0;
    EdgeFault fault;
  };
  Edge& edge(int source, int target) { return edges_[source * world_ + target]; }

  FabricConfig config_;
  int world_;
  uint8_t* slabs_[kMaxWorld] = {};
  std::vector<Edge> edges_;
  std::vector<uint64_t> bytes_;
  std::priority_queue<Piece, std::vector<Piece>, std::greater<>> flying_;
  std::mt19937_64 random_;
  uint64_t now_ = 0;
  uint64_t order_ = 0;
  mutable std::mutex mutex_;
};

}  // namespace sm120::host
