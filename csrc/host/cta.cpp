// SPDX-License-Identifier: Apache-2.0
// What a CTA does: push its contributions, clear its share of the stale slot, then carry each tile
// through reduce, cross and gather as data arrives.
#include "host/engine.h"
#include "host/lanes.h"

namespace sm120::host {
namespace {

constexpr uint32_t kWindow = 8;  // unfinished tiles to look at in one go

}  // namespace

void Cta::begin(Engine* engine, uint32_t cta) {
  engine_ = engine;
  cta_ = cta;
  const uint32_t tiles = engine->args_.shape.tiles();
  first_ = cta_begin(tiles, engine->plan_.ctas, cta);
  end_ = cta_begin(tiles, engine->plan_.ctas, cta + 1);
  pushed_ = first_;
  cleared_ = false;
  records_ = cta != 0;  // one CTA per rank checks the call records
  for (uint64_t& bytes : payload_) bytes = 0;
  // The call record has gone to everyone.
  stored_to_ = cta == 0 ? (1u << engine->topology_.world) - 1 : 0;
  tiles_.clear();
  head_ = 0;
  const View& view = engine->view_;
  for (uint32_t t = first_; t < end_; ++t) {
    const Stage stage = view.reduces(t)        ? Stage::kReduce
                        : view.polls_result(t) ? Stage::kGather
                                               : Stage::kCross;
    tiles_.push_back(Tile{t, stage, static_cast<uint8_t>(stage == Stage::kCross ? 1 : 0)});
  }
}

Status Cta::advance(bool one_step) {
  const Status status = move_on(one_step);
  if (stored_to_ != 0) {
    engine_->wake(stored_to_);
    stored_to_ = 0;
  }
  return status;
}

Status Cta::move_on(bool one_step) {
  // All pushes come before the first poll: no rank waits for a tile that a waiting rank still
  // holds.
  if (pushed_ < end_) {
    do {
      scatter(pushed_++);
      if (one_step) return Status::kProgress;
    } while (pushed_ < end_);
  }
  if (!cleared_) {
    clear_share();
    cleared_ = true;
    if (one_step) return Status::kProgress;
  }
  bool moved = false;
  if (!records_ && engine_->records_agree()) records_ = moved = true;
  // Look a few unfinished tiles ahead, not at all of them: the lowest unfinished tile of the group
  // is at the head of every rank that still needs it, so it can always move.
  uint32_t blocked = 0;
  for (size_t i = head_; i < tiles_.size() && blocked < kWindow && !(one_step && moved); ++i) {
    Tile& tile = tiles_[i];
    if (tile.stage == Stage::kDone) continue;
    if (advance_tile(tile)) moved = true;
    if (tile.stage != Stage::kDone) ++blocked;
  }
  while (head_ < tiles_.size() && tiles_[head_].stage == Stage::kDone) ++head_;
  if (head_ == tiles_.size() && records_) return Status::kDone;
  return moved ? Status::kProgress : Status::kStalled;
}

Cta::Wait Cta::waiting() const {
  const View& view = engine_->view_;
  if (head_ == tiles_.size()) {
    for (int r = 0; r < view.topology.world; ++r) {
      if (r != engine_->rank_ && !engine_->announced(r)) return {Phase::kRecord, 0, r, 0};
    }
    return {Phase::kIdle, 0, engine_->rank_, 0};
  }
  // Of the tiles that were polled, name what is nearest to the source of the trouble: a raw
  // contribution, else a partial, else a result.
  size_t chosen = head_;
  uint32_t seen = 0;
  for (size_t i = head_; i < tiles_.size() && seen < kWindow; ++i) {
    if (tiles_[i].stage == Stage::kDone) continue;
    ++seen;
    if (tiles_[i].stage < tiles_[chosen].stage) chosen = i;
  }
  const Tile& tile = tiles_[chosen];
  switch (tile.stage) {
    case Stage::kReduce:
      return {Phase::kReduce, tile.index, static_cast<int>(view.source_rank(tile.next)), 0};
    case Stage::kCross: {
      const uint32_t islands = view.topology.islands;
      const uint32_t from = (view.island + islands - tile.next % islands) % islands;
      return {Phase::kCross, tile.index, static_cast<int>(view.partial_sender(tile.index, from)),
              tile.next};
    }
    default:
      return {Phase::kGather, tile.index, static_cast<int>(view.owner(tile.index)), 0};
  }
}

void Cta::send(const Push& push, Codec codec, const void* bytes, uint32_t count) {
  const Engine& e = *engine_;
  const uint64_t offset = e.layout_.at(e.slot_, push.region, push.index, wire_stride(codec));
  payload_[push.dst] += count;
  stored_to_ |= 1u << push.dst;
  if (e.link_ != nullptr) {
    e.link_->store(e.rank_, push.dst, offset, bytes, count);
  } else {
    lanes::store(e.slabs_[push.dst] + offset, bytes, count);
  }
}

void Cta::scatter(uint32_t tile) {
  const Engine& e = *engine_;
  const uint32_t fanout = e.view_.scatter_fanout(tile);
  if (fanout == 0) return;
  const Span span = span_of(e.args_.shape, tile);
  const auto* x = static_cast<const uint8_t*>(e.args_.x) +
                  element_offset(e.args_.shape, span) * dtype_bytes(e.plan_.dtype);
  const uint32_t bytes = wire_bytes(e.plan_.codec, span.length);
  if (e.link_ == nullptr && fanout == 1) {
    // One receiver: encode straight into its slab.
    const Push push = e.view_.scatter_push(tile, 0);
    const uint64_t at = e.layout_.at(e.slot_, push.region, push.index, wire_stride(e.plan_.codec));
    payload_[push.dst] += bytes;
    stored_to_ |= 1u << push.dst;
    lanes::push(e.plan_.codec, e.plan_.dtype, x, e.slabs_[push.dst] + at, span.length);
    return;
  }
  alignas(64) uint8_t wire[kTile * 4] = {};
  lanes::push(e.plan_.codec, e.plan_.dtype, x, wire, span.length);
  for (uint32_t i = 0; i < fanout; ++i) {
    send(e.view_.scatter_push(tile, i), e.plan_.codec, wire, bytes);
  }
}

void Cta::clear_share() {
  const Engine& e = *engine_;
  const uint32_t slot = e.stale_slot_;
  if (cta_ == 0) lanes::clear(e.page()->record[slot], sizeof e.page()->record[0]);
  const Engine::Use& use = e.uses_[slot];
  const View& view = use.view;
  const uint32_t tiles = use.shape.tiles();
  const uint32_t stride = wire_stride(use.codec);
  const uint32_t end = cta_begin(tiles, e.plan_.ctas, cta_ + 1);
  for (uint32_t t = cta_begin(tiles, e.plan_.ctas, cta_); t < end; ++t) {
    const uint32_t length = span_of(use.shape, t).length;
    const uint32_t bytes = wire_bytes(use.codec, length);
    if (view.reduces(t)) {
      const uint32_t base = view.reduce_base(t);
      for (uint32_t i = 0; i < view.sources(); ++i) {
        if (i == view.source) continue;
        lanes::clear(e.own_in(slot, Region::kReduce, base + i, stride), bytes);
      }
    }
    if (view.adds_partials(t)) {
      for (uint32_t i = 0; i < view.topology.islands; ++i) {
        lanes::clear(
            e.own_in(slot, Region::kCross, view.cross_base(t) + i, wire_stride(use.partial)),
            wire_bytes(use.partial, length));
      }
    }
    if (view.polls_result(t)) lanes::clear(e.own_in(slot, Region::kGather, t, stride), bytes);
  }
}

bool Cta::advance_tile(Tile& tile) {
  switch (tile.stage) {
    case Stage::kReduce:
      return advance_reduce(tile);
    case Stage::kCross:
      return advance_cross(tile);
    default:
      return advance_gather(tile);
  }
}

bool Cta::advance_reduce(Tile& tile) {
  const Engine& e = *engine_;
  const View& view = e.view_;
  const Codec codec = e.plan_.codec;
  const uint32_t stride = wire_stride(codec);
  const Span span = span_of(e.args_.shape, tile.index);
  const uint32_t n = span.length;
  const uint32_t base = view.reduce_base(tile.index);
  const uint8_t before = tile.next;
  while (tile.next < view.sources()) {
    if (tile.next != view.source &&
        !lanes::arrived(codec, e.own(Region::kReduce, base + tile.next, stride), n)) {
      return tile.next != before;
    }
    ++tile.next;
  }

  const auto* mine = static_cast<const uint8_t*>(e.args_.x) +
                     element_offset(e.args_.shape, span) * dtype_bytes(e.plan_.dtype);
  alignas(64) uint8_t own_wire[kInt8Header + kTile];
  if (codec == Codec::kInt8) lanes::push(codec, e.plan_.dtype, mine, own_wire, n);
  alignas(64) float total[kTile];
  alignas(64) float part[kTile];
  // Sources come in canonical order, so island i's are topology.begin[i].. less where my group
  // starts.
  const Topology& topology = view.topology;
  const uint32_t first_island = view.flat ? 0 : view.island;
  const uint32_t last_island = view.flat ? topology.islands : view.island + 1u;
  for (uint32_t island = first_island; island < last_island; ++island) {
    float* sum = island == first_island ? total : part;
    for (uint32_t s = topology.begin[island]; s < topology.begin[island + 1]; ++s) {
      const uint32_t source = s - view.begin;
      const bool first = s == topology.begin[island];
      if (source == view.source && codec != Codec::kInt8) {
        (first ? lanes::set_user : lanes::add_user)(e.plan_.dtype, mine, sum, n);
      } else {
        const uint8_t* wire =
            source == view.source ? own_wire : e.own(Region::kReduce, base + source, stride);
        (first ? lanes::set : lanes::add)(codec, wire, sum, n);
      }
    }
    if (view.flat && topology.islands > 1) lanes::through(e.plan_.partial, sum, n);
    if (island != first_island) lanes::add_floats(part, total, n);
  }
  if (view.cross) {
    cross(tile.index, total, n);
    tile.stage = Stage::kCross;
    tile.next = 1;
    advance_cross(tile);
  } else {
    finish(tile.index, span, total);
    tile.stage = Stage::kDone;
  }
  return true;
}

void Cta::cross(uint32_t tile, float* partial, uint32_t length) {
  const Engine& e = *engine_;
  const Codec codec = e.plan_.partial;
  // My own partial goes into my slab in wire form, and is read back like the others.
  alignas(64) uint8_t wire[kTile * 4] = {};
  lanes::push_floats(codec, partial, wire, length);
  const uint32_t bytes = wire_bytes(codec, length);
  lanes::store(e.own(Region::kCross, e.view_.cross_base(tile) + e.view_.island, wire_stride(codec)),
               wire, bytes);
  for (uint32_t i = 0; i < e.view_.cross_fanout(tile); ++i) {
    send(e.view_.cross_push(tile, i), codec, wire, bytes);
  }
}

bool Cta::advance_cross(Tile& tile) {
  const Engine& e = *engine_;
  const View& view = e.view_;
  const Codec codec = e.plan_.partial;
  const uint32_t stride = wire_stride(codec);
  const uint32_t islands = view.topology.islands;
  const uint32_t base = view.cross_base(tile.index);
  const Span span = span_of(e.args_.shape, tile.index);
  const uint8_t before = tile.next;
  // Nearest neighbour first, as the ring delivers; step `islands` is my own island (two-hop only).
  for (; tile.next <= islands; ++tile.next) {
    const uint32_t from = (view.island + islands - tile.next % islands) % islands;
    if (!view.polls_partial(tile.index, from)) continue;
    uint8_t* wire = e.own(Region::kCross, base + from, stride);
    if (!lanes::arrived(codec, wire, span.length)) return tile.next != before;
    if (view.ring_forwards(from)) {
      alignas(64) uint8_t copy[kTile * 4];
      const uint32_t bytes = wire_bytes(codec, span.length);
      lanes::fetch(wire, copy, bytes);
      send(view.ring_push(tile.index, from), codec, copy, bytes);
    }
  }
  alignas(64) float total[kTile];
  for (uint32_t island = 0; island < islands; ++island) {
    (island == 0 ? lanes::set : lanes::add)(codec, e.own(Region::kCross, base + island, stride),
                                            total, span.length);
  }
  finish(tile.index, span, total);
  tile.stage = Stage::kDone;
  return true;
}

bool Cta::advance_gather(Tile& tile) {
  Engine& e = *engine_;
  const Codec codec = e.plan_.codec;
  const Span span = span_of(e.args_.shape, tile.index);
  const uint8_t* wire = e.own(Region::kGather, tile.index, wire_stride(codec));
  if (!lanes::arrived(codec, wire, span.length)) return false;
  if (codec == Codec::kInt8) {
    alignas(64) float sum[kTile];
    lanes::set(codec, wire, sum, span.length);
    lanes::round(e.plan_.dtype, sum, e.sum_at(span), span.length);
  } else {
    lanes::fetch(wire, e.sum_at(span), wire_bytes(codec, span.length));
  }
  e.tile_ready(tile.index, span);
  tile.stage = Stage::kDone;
  return true;
}

void Cta::finish(uint32_t tile, const Span& span, float* sum) {
  Engine& e = *engine_;
  const Codec codec = e.plan_.codec;
  uint8_t* out = e.sum_at(span);
  const uint32_t fanout = e.view_.gather_fanout(tile);
  const uint32_t bytes = wire_bytes(codec, span.length);
  if (codec == Codec::kInt8) {
    // The owner too keeps what the receivers will decode, and so do ranks that send nothing.
    alignas(64) uint8_t wire[kInt8Header + kTile] = {};
    lanes::push_floats(codec, sum, wire, span.length);
    for (uint32_t i = 0; i < fanout; ++i) send(e.view_.gather_push(tile, i), codec, wire, bytes);
    lanes::set(codec, wire, sum, span.length);
    lanes::round(e.plan_.dtype, sum, out, span.length);
  } else {
    lanes::round(e.plan_.dtype, sum, out, span.length);
    for (uint32_t i = 0; i < fanout; ++i) send(e.view_.gather_push(tile, i), codec, out, bytes);
  }
  e.tile_ready(tile, span);
}

}  // namespace sm120::host
