// SPDX-License-Identifier: Apache-2.0
#include "host/fabric.h"

#include <algorithm>
#include <cstring>

#include "host/lanes.h"

namespace sm120::host {

Fabric::Fabric(const FabricConfig& config, int world, uint8_t* const* slabs)
    : config_(config),
      world_(world),
      edges_(static_cast<size_t>(world) * world),
      bytes_(static_cast<size_t>(world) * world),
      random_(config.seed) {
  for (int r = 0; r < world; ++r) slabs_[r] = slabs[r];
}

void Fabric::add_fault(const EdgeFault& fault) { edge(fault.source, fault.target).fault = fault; }

bool Fabric::alive(int source, int target) const {
  const std::lock_guard lock(mutex_);
  const Edge& e = edges_[source * world_ + target];
  return e.stores < e.fault.lose_after;
}

void Fabric::store(int source, int target, uint64_t offset, const void* bytes, uint32_t count) {
  const std::lock_guard lock(mutex_);
  Edge& e = edge(source, target);
  if (offset >= kControlBytes) bytes_[source * world_ + target] += count;
  if (e.stores++ >= e.fault.lose_after) return;

  const uint32_t unit = config_.tear == 0 ? kPiece : std::min(config_.tear, kPiece);
  const uint32_t pieces = (count + unit - 1) / unit;
  std::vector<uint32_t> sequence(pieces);
  for (uint32_t i = 0; i < pieces; ++i) sequence[i] = i;
  if (config_.shuffle) std::shuffle(sequence.begin(), sequence.end(), random_);

  uint64_t due = std::max(e.free_at, now_ + config_.delay_ns + e.fault.extra_delay_ns);
  for (uint32_t i : sequence) {
    Piece piece;
    piece.count = std::min(unit, count - i * unit);
    piece.offset = offset + static_cast<uint64_t>(i) * unit;
    piece.target = target;
    memcpy(piece.bytes, static_cast<const uint8_t*>(bytes) + i * unit, piece.count);
    if (config_.jitter_ns != 0) due += random_() % config_.jitter_ns / pieces;
    if (config_.bytes_per_us != 0) due += piece.count * 1000 / config_.bytes_per_us;
    piece.due = due;
    piece.order = order_++;
    flying_.push(piece);
  }
  e.free_at = due;
}

uint64_t Fabric::advance(uint64_t now_ns) {
  const std::lock_guard lock(mutex_);
  now_ = std::max(now_, now_ns);
  while (!flying_.empty() && flying_.top().due <= now_) {
    const Piece& piece = flying_.top();
    lanes::store(slabs_[piece.target] + piece.offset, piece.bytes, piece.count);
    flying_.pop();
  }
  return flying_.empty() ? ~uint64_t{0} : flying_.top().due;
}

}  // namespace sm120::host
