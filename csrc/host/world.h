// SPDX-License-Identifier: Apache-2.0
// All ranks of a group in one process, to test the protocol: stepped one tile at a time in a seeded
// random order under a virtual clock, or as real threads.
#pragma once

#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "host/engine.h"
#include "host/fabric.h"

namespace sm120::host {

// One call of every rank. Tensors are [world, rows, hidden]; rank r uses its first rows[r] rows.
struct WorldCall {
  Plan plan{};
  Op op = Op::kAllReduce;
  uint32_t hidden = 0;
  std::vector<uint32_t> rows;
  uint32_t stride_rows = 0;  // rows of one rank's part of the tensors
  const uint8_t* x = nullptr;
  const uint8_t* residual = nullptr;  // [rows, hidden], the same for all ranks
  const uint8_t* weight = nullptr;
  bool weight_f32 = false;
  bool gemma = false;
  float eps = 0.0f;
  uint8_t* out = nullptr;
  uint8_t* residual_out = nullptr;
  uint8_t* codes = nullptr;
  float* scales = nullptr;
};

struct WorldConfig {
  Topology topology{};
  uint64_t capacity = 0;
  uint64_t small = 0;
  uint64_t seed = 0;
  uint64_t timeout_ns = 1'000'000'000;
  uint64_t longest_stall_ns = 0;  // a rank may pause so long before a call
  int victim = -1;                // this rank stops for ever ...
  uint64_t victim_call = 0;       // ... in this call ...
  uint64_t victim_steps = 0;      // ... after so many steps of it
  bool death_seen = false;        // the others can tell that its process has ended
  std::optional<FabricConfig> fabric;
  std::vector<EdgeFault> faults;
};

class World {
 public:
  explicit World(const WorldConfig& config);

  // Every rank runs all calls, one after another, as soon as it can. Returns the failure text of
  // each rank, empty where all calls ended well. A world with failures is finished.
  std::vector<std::string> run_stepped(const std::vector<WorldCall>& calls);
  std::vector<std::string> run_threads(const std::vector<WorldCall>& calls);

  Engine& engine(int rank) { return *engines_[rank]; }
  // Bytes of tiles over each edge so far, [source * world + target].
  std::vector<uint64_t> edge_bytes() const;
  // Virtual nanoseconds (stepped).
  uint64_t now_ns() const { return now_; }
  uint64_t steps() const { return steps_; }

 private:
  struct Progress {
    size_t call = 0;
    bool inside = false;
    bool ended = false;
    uint64_t resume_at = 0;
    uint64_t steps = 0;
    uint64_t moved_at = 0;
    std::vector<bool> done;  // per CTA of the current call
  };
  Args args_for(const WorldCall& call, int rank, uint64_t index) const;
  bool step(const std::vector<WorldCall>& calls, int rank);
  void look(int rank, std::string& failure);

  WorldConfig config_;
  Layout layout_;
  std::unique_ptr<uint8_t[]> memory_;
  uint8_t* slabs_[kMaxWorld] = {};
  std::unique_ptr<Fabric> fabric_;
  std::vector<std::unique_ptr<Engine>> engines_;
  std::vector<Progress> progress_;
  std::mt19937_64 random_;
  uint64_t calls_before_ = 0;
  uint64_t now_ = 1;
  uint64_t steps_ = 0;
};

}  // namespace sm120::host
