// SPDX-License-Identifier: Apache-2.0
// One rank's part of a call, as a state machine per CTA that never blocks. Processes, threads and
// the stepped world drive the same code; what differs is who calls `advance` and how a store
// travels.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/layout.h"
#include "core/sum.h"

namespace sm120::host {

// How a store reaches another rank's slab when it does not simply land there (the software fabric).
class Link {
 public:
  virtual ~Link() = default;
  virtual void store(int source, int target, uint64_t offset, const void* bytes,
                     uint32_t count) = 0;
  // Whether an abort word still gets through on this edge.
  virtual bool alive(int source, int target) const = 0;
};

// One call as the caller gave it. Pointers are to contiguous [rows, hidden] tensors.
struct Args {
  Op op = Op::kAllReduce;
  Dtype dtype = Dtype::kF32;
  Shape shape{};
  uint32_t total_rows = 0;  // of the user's call, when this is one of several pieces of it
  uint64_t call = 0;        // the user's call number, the same on every rank
  const void* x = nullptr;
  const void* residual = nullptr;
  const void* weight = nullptr;  // [hidden]
  bool weight_f32 = false;
  bool gemma = false;
  float eps = 0.0f;
  void* out = nullptr;           // the sum, or the normalised rows
  void* residual_out = nullptr;  // norm operations
  uint8_t* codes = nullptr;      // FP8: [rows, hidden]
  float* scales = nullptr;       // FP8: [rows]
};

// Why a call cannot finish. `text` is the whole sentence.
struct Failure {
  Abort why = Abort::kNone;
  int culprit = -1;
  std::string text;
};

enum class Status : uint8_t { kProgress, kStalled, kDone };

class Engine;

// The tiles of one CTA in the current call.
class Cta {
 public:
  // Move on as far as data allows, or by one tile step when `one_step`. kStalled: nothing to do
  // now.
  Status advance(bool one_step);

  // What a stalled CTA waits for.
  struct Wait {
    Phase phase;
    uint32_t tile;
    int source;
    uint32_t step;  // kCross: how many islands away the partial was made
  };
  Wait waiting() const;

 private:
  friend class Engine;
  enum class Stage : uint8_t { kReduce, kCross, kGather, kDone };
  struct Tile {
    uint32_t index;
    Stage stage;
    uint8_t next;  // kReduce: next source to poll; kCross: next step round the islands
  };

  void begin(Engine* engine, uint32_t cta);
  Status move_on(bool one_step);
  void scatter(uint32_t tile);
  void send(const Push& push, Codec codec, const void* bytes, uint32_t count);
  void clear_share();
  bool advance_tile(Tile& tile);
  bool advance_reduce(Tile& tile);
  bool advance_cross(Tile& tile);
  bool advance_gather(Tile& tile);
  void cross(uint32_t tile, float* partial, uint32_t length);
  void finish(uint32_t tile, const Span& span, float* sum);

  Engine* engine_ = nullptr;
  uint32_t cta_ = 0;
  uint32_t first_ = 0;
  uint32_t end_ = 0;
  uint32_t pushed_ = 0;
  bool cleared_ = false;
  bool records_ = false;
  std::vector<Tile> tiles_;           // in ascending order
  size_t head_ = 0;                   // the first that is not done
  uint64_t payload_[kMaxWorld] = {};  // bytes sent to each rank in this call
  uint32_t stored_to_ = 0;            // ranks to wake, one bit each
};

class Engine {
 public:
  // `slabs[r]` is the slab of rank r, on one channel. `link` may be null: stores then land at once.
  Engine(int rank, int channel, const Topology& topology, const Layout& layout,
         uint8_t* const* slabs, Link* link);

  // Fill this rank's own slab; once, before any peer may store into it.
  void initialise();

  // Start a call. The caller then advances every CTA until all are done, and calls `end`.
  void begin(const Plan& plan, const Args& args);
  void end();

  Cta& cta(uint32_t i) { return ctas_[i]; }
  uint32_t ctas() const { return plan_.ctas; }
  // The CTA that waits for the earliest data; while no other thread advances one.
  uint32_t stuck_cta() const;
  int rank() const { return rank_; }
  uint64_t epoch() const { return epoch_; }
  const Args& args() const { return args_; }
  // Bytes of tiles stored into each peer's slab since construction (call records not counted).
  const uint64_t* payload_bytes() const { return payload_; }
  ControlPage* page() const { return page_of(rank_); }
  ControlPage* page_of(int rank) const { return reinterpret_cast<ControlPage*>(slabs_[rank]); }

  // Failures a waiting rank can see without a clock: another rank's abort, another shape.
  Failure check() const;
  Failure aborted() const;  // another rank's abort alone
  // Also tells the peers, after an eighth of the bound, whom this rank waits for.
  // `waited_ns` since this CTA last moved; `dead` and `left`: bit masks of ranks that ended or
  // closed.
  Failure check_wait(const Cta& cta, uint64_t waited_ns, uint64_t bound_ns, uint32_t dead,
                     uint32_t left);
  // Tell every rank, fill the outputs with NaN, and stay failed.
  void fail(const Failure& failure, const Cta& cta, uint64_t waited_ns);
  const Failure& failure() const { return failure_; }

  // Whether rank `peer` has announced its part of the current call.
  bool announced(int peer) const;

 private:
  friend class Cta;
  void send_record();
  int first_absent() const;
  void tell_wait(const Cta::Wait& wait);
  void tell_wait(uint64_t word);
  int follow(int start, uint64_t* earliest) const;
  int source_of_trouble(int polled) const;
  void wake(uint32_t peers) const;
  bool records_agree() const;
  void tile_ready(uint32_t tile, const Span& span);
  void finish_row(uint32_t row);
  uint8_t* own(Region region, uint32_t index, uint32_t stride) const {
    return own_in(slot_, region, index, stride);
  }
  uint8_t* own_in(uint32_t slot, Region region, uint32_t index, uint32_t stride) const {
    return slabs_[rank_] + layout_.at(slot, region, index, stride);
  }
  CallRecord record_from(int peer) const;
  std::string mismatch_text(int culprit, const CallRecord& theirs) const;
  // Where the rounded sum of a tile is put: the output, or the residual's place until it is added.
  uint8_t* sum_at(const Span& span) const;

  int rank_;
  int channel_;
  Topology topology_;
  Layout layout_;
  uint8_t* slabs_[kMaxWorld] = {};
  Link* link_;

  Plan plan_{};
  View view_{};
  Args args_{};
  CallRecord record_{};
  // What a slot was last used for, so that exactly the cells written then are cleared.
  struct Use {
    View view;
    Shape shape;
    Codec codec;
    Codec partial;
  };
  Use uses_[kSlots] = {};
  uint64_t epoch_ = 0;
  uint32_t slot_ = 0;
  uint32_t stale_slot_ = 0;
  std::vector<Cta> ctas_;
  std::vector<float> exact_;                             // fp32 rows before the norm
  std::vector<float> squares_;                           // sum of squares per tile
  std::unique_ptr<std::atomic<uint32_t>[]> tiles_left_;  // per row
  uint32_t rows_allocated_ = 0;
  uint64_t payload_[kMaxWorld] = {};
  uint64_t told_wait_ = 0;  // the wait_word the peers hold of this rank
  Failure failure_;
};

const char* op_name(Op op);
const char* dtype_name(Dtype dtype);
// "all_reduce, 4 x 7168 bf16"
std::string call_text(Op op, Dtype dtype, uint32_t rows, uint32_t hidden);

}  // namespace sm120::host
