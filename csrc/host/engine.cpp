// SPDX-License-Identifier: Apache-2.0
#include "host/engine.h"

#include <cmath>
#include <cstdio>

#include "host/lanes.h"
#include "host/wait.h"

namespace sm120::host {

const char* op_name(Op op) {
  switch (op) {
    case Op::kAllReduce:
      return "all_reduce";
    case Op::kAllReduceRmsNorm:
      return "all_reduce_rmsnorm";
    default:
      return "all_reduce_rmsnorm_fp8";
  }
}

const char* dtype_name(Dtype dtype) {
  return dtype == Dtype::kBf16 ? "bf16" : dtype == Dtype::kF16 ? "fp16" : "fp32";
}

std::string call_text(Op op, Dtype dtype, uint32_t rows, uint32_t hidden) {
  return std::string(op_name(op)) + " " + std::to_string(rows) + " x " + std::to_string(hidden) +
         " " + dtype_name(dtype);
}

Engine::Engine(int rank, int channel, const Topology& topology, const Layout& layout,
               uint8_t* const* slabs, Link* link)
    : rank_(rank), channel_(channel), topology_(topology), layout_(layout), link_(link) {
  for (int r = 0; r < topology.world; ++r) slabs_[r] = slabs[r];
}

void Engine::initialise() {
  lanes::clear(slabs_[rank_] + kControlBytes, layout_.slab_bytes - kControlBytes);
  ControlPage* own = page();
  *own = ControlPage{};
  lanes::clear(own->record, sizeof own->record);
}

void Engine::begin(const Plan& plan, const Args& args) {
  plan_ = plan;
  view_ = make_view(plan, rank_);
  args_ = args;
  const Shape& shape = args_.shape;
  ControlPage* own = page();
  epoch_ = own->epoch++;
  slot_ = slot_of(epoch_);
  stale_slot_ = slot_to_clear(epoch_);
  uses_[slot_] = Use{view_, shape, plan.codec, plan.partial};
  record_ = make_record(epoch_, args.op, plan.dtype, make_shape(args.total_rows, shape.hidden),
                        plan_hash(plan));
  if (args.op != Op::kAllReduce) {
    exact_.resize(static_cast<size_t>(shape.rows) * shape.hidden);
    squares_.resize(shape.tiles());
    if (rows_allocated_ < shape.rows) {
      tiles_left_ = std::make_unique<std::atomic<uint32_t>[]>(shape.rows);
      rows_allocated_ = shape.rows;
    }
    for (uint32_t r = 0; r < shape.rows; ++r) {
      tiles_left_[r].store(shape.tiles_per_row, std::memory_order_relaxed);
    }
  }
  if (ctas_.size() < plan.ctas) ctas_.resize(plan.ctas);
  for (uint32_t c = 0; c < plan.ctas; ++c) ctas_[c].begin(this, c);
  send_record();
}

void Engine::end() {
  tell_wait(uint64_t{0});
  for (uint32_t c = 0; c < plan_.ctas; ++c) {
    for (int r = 0; r < topology_.world; ++r) payload_[r] += ctas_[c].payload_[r];
  }
}

void Engine::send_record() {
  const uint64_t offset = reinterpret_cast<uint8_t*>(&page()->record[slot_][rank_]) - slabs_[rank_];
  for (int i = 1; i < topology_.world; ++i) {
    const int peer = (rank_ + i) % topology_.world;
    if (link_ != nullptr) {
      link_->store(rank_, peer, offset, &record_, sizeof record_);
    } else {
      lanes::store(slabs_[peer] + offset, &record_, sizeof record_);
    }
  }
}

void Engine::wake(uint32_t peers) const {
  if (link_ != nullptr) return;  // the fabric delivers later, and its ranks never sleep
  // Pairs with the fence in Sleeper::arm: either we see it sleeping, or it sees what we stored.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (int peer = 0; peer < topology_.world; ++peer) {
    if (peer == rank_ || (peers & (1u << peer)) == 0) continue;
    ControlPage* page = page_of(peer);
    if (__atomic_load_n(&page->sleeping, __ATOMIC_RELAXED) != 0) ring(page);
  }
}

CallRecord Engine::record_from(int peer) const {
  CallRecord record;
  lanes::fetch(&page()->record[slot_][peer], &record, sizeof record);
  return record;
}

bool Engine::announced(int peer) const { return record_arrived(record_from(peer)); }

bool Engine::records_agree() const {
  for (int peer = 0; peer < topology_.world; ++peer) {
    if (peer == rank_) continue;
    const CallRecord record = record_from(peer);
    if (!record_arrived(record) || !same_call(record, record_)) return false;
  }
  return true;
}

uint8_t* Engine::sum_at(const Span& span) const {
  void* base = args_.op == Op::kAllReduce ? args_.out : args_.residual_out;
  return static_cast<uint8_t*>(base) + element_offset(args_.shape, span) * dtype_bytes(plan_.dtype);
}

void Engine::tile_ready(uint32_t tile, const Span& span) {
  if (args_.op == Op::kAllReduce) return;
  const uint64_t at = element_offset(args_.shape, span);
  void* sum = sum_at(span);
  // SGLang's RMSNorm normalises the fp32 sum with the residual, its Gemma form the rounded one.
  squares_[tile] = lanes::residual_add(
      plan_.dtype, sum, static_cast<const uint8_t*>(args_.residual) + at * dtype_bytes(plan_.dtype),
      sum, exact_.data() + at, args_.gemma, span.length);
  // The CTA that brings a row's last tile normalises the row.
  if (tiles_left_[span.row].fetch_sub(1, std::memory_order_acq_rel) == 1) finish_row(span.row);
}

void Engine::finish_row(uint32_t row) {
  const Shape& shape = args_.shape;
  float squares = 0.0f;
  for (uint32_t i = 0; i < shape.tiles_per_row; ++i) {
    squares += squares_[row * shape.tiles_per_row + i];
  }
  const float scale = 1.0f / std::sqrt(squares / static_cast<float>(shape.hidden) + args_.eps);
  const uint64_t at = static_cast<uint64_t>(row) * shape.hidden;
  uint8_t* out = static_cast<uint8_t*>(args_.out) + at * dtype_bytes(plan_.dtype);
  lanes::norm(plan_.dtype, exact_.data() + at, scale, args_.weight, args_.weight_f32, args_.gemma,
              out, shape.hidden);
  if (args_.op == Op::kAllReduceRmsNormFp8) {
    args_.scales[row] = lanes::quantise_e4m3(plan_.dtype, out, args_.codes + at, shape.hidden);
  }
}

}  // namespace sm120::host
