// SPDX-License-Identifier: Apache-2.0
// Who sends which tile to whom in which hop, as pure functions of (plan, rank, tile).
//
//   scatter  raw contributions go to the rank(s) that reduce the tile          -> region kReduce
//   cross    island partials go to the ranks that add them up                  -> region kCross
//   gather   the finished sum goes to the ranks that did not compute it        -> region kGather
//
//   schedule          scatter to          cross to                     gather to
//   one-shot          everyone            -                            -
//   two-shot          the tile's owner    -                            everyone
//   island two-hop    owner in my island  everyone                     -
//   island dataflow   owner in my island  owners in the other islands  my island
//   island ring       as dataflow, but partials travel round the islands from neighbour to
//   neighbour mailbox           as dataflow, with the slabs in pinned host memory (GPUs without
//   P2P)
//
// With one island, the island schedules are two-shot. The owner of tile t in island I is
// I.member[t mod |I|]; in two-shot it is rank t mod world. Every byte pushed to a rank in a call is
// polled by that rank in the same call: the reuse of slots depends on it.
#pragma once

#include "codec.h"
#include "islands.h"

namespace sm120 {

enum class Schedule : uint8_t {
  kOneShot = 0,
  kTwoShot = 1,
  kIslandTwoHop = 2,
  kIslandDataflow = 3,
  kIslandRing = 4,
  kMailbox = 5,
};
inline constexpr int kSchedules = 6;

enum class Region : uint8_t { kReduce = 0, kCross = 1, kGather = 2 };
inline constexpr int kRegions = 3;

// What every rank must agree on. `codec` dresses contributions and results, `partial` what islands
// exchange: the dtype's own codec (one more rounding), kF32 (strict), or kInt8 when `codec` is.
struct Plan {
  Topology topology;
  Schedule schedule;
  Dtype dtype;
  Codec codec;
  Codec partial;
  uint16_t ctas;
};

// One store: the tile goes to slot `index` of `region` in the slab of rank `dst`.
struct Push {
  uint8_t dst;
  Region region;
  uint32_t index;
};

// A plan seen from one rank; plain data, fit to be a kernel parameter. The methods are a few
// integer instructions each: division by a group size is one multiplication.
struct View {
  Topology topology;
  uint32_t magic[kMaxWorld + 1];  // ceil(2^32 / n), exact quotients for tiles below 2^28
  Schedule schedule;
  uint8_t rank;
  uint8_t island;
  uint8_t lane;    // my index among the owners of my group
  uint8_t owners;  // size of the group that shares ownership: the world or my island
  uint8_t
      begin;  // where the group starts in topology.member (sources of kReduce, in canonical order)
  uint8_t source;  // my index among the sources of kReduce
  bool flat;       // ownership spans the world
  bool cross;      // partials are exchanged
  bool gather;     // results are gathered

  SM120_HD constexpr uint32_t quotient(uint32_t tile, uint32_t n) const {
    return n == 1 ? tile : static_cast<uint32_t>((static_cast<uint64_t>(tile) * magic[n]) >> 32);
  }
  SM120_HD constexpr uint32_t remainder(uint32_t tile, uint32_t n) const {
    return tile - quotient(tile, n) * n;
  }
  // Index of a tile among those its owner holds.
  SM120_HD constexpr uint32_t owned(uint32_t tile) const { return quotient(tile, owners); }

  SM120_HD constexpr uint32_t owner_in(uint32_t i, uint32_t tile) const {
    return topology.member[topology.begin[i] + remainder(tile, topology.size(i))];
  }
  // The rank of my group that sums this tile (meaningless for one-shot: everyone does).
  SM120_HD constexpr uint32_t owner(uint32_t tile) const {
    return flat ? remainder(tile, topology.world) : owner_in(island, tile);
  }
  SM120_HD constexpr bool one_shot() const { return schedule == Schedule::kOneShot; }
  SM120_HD constexpr bool two_hop() const { return cross && schedule == Schedule::kIslandTwoHop; }
  SM120_HD constexpr bool ring() const { return cross && schedule == Schedule::kIslandRing; }
  // Whether I sum the raw contributions to this tile.
  SM120_HD constexpr bool reduces(uint32_t tile) const {
    return one_shot() || remainder(tile, owners) == lane;
  }

  // --- scatter ---------------------------------------------------------------------------------
  SM120_HD constexpr uint32_t scatter_fanout(uint32_t tile) const {
    return one_shot() ? topology.world - 1u : reduces(tile) ? 0u : 1u;
  }
  SM120_HD constexpr Push scatter_push(uint32_t tile, uint32_t i) const {
    if (one_shot()) {
      const uint32_t dst = wrap(rank + 1u + i, topology.world);
      return Push{static_cast<uint8_t>(dst), Region::kReduce, tile * topology.world + source};
    }
    return Push{static_cast<uint8_t>(owner(tile)), Region::kReduce, reduce_base(tile) + source};
  }
  // Where the sources' contributions lie at a reducer: sources in canonical order, one after
  // another.
  SM120_HD constexpr uint32_t sources() const { return flat ? topology.world : owners; }
  SM120_HD constexpr uint32_t reduce_base(uint32_t tile) const {
    return one_shot() ? tile * topology.world : owned(tile) * owners;
  }
  SM120_HD constexpr uint32_t source_rank(uint32_t i) const { return topology.member[begin + i]; }

  // --- cross -----------------------------------------------------------------------------------
  // Whether I add up the island partials of this tile (and so poll all of them but my own).
  SM120_HD constexpr bool adds_partials(uint32_t tile) const {
    return cross && (two_hop() || reduces(tile));
  }
  SM120_HD constexpr uint32_t cross_fanout(uint32_t tile) const {
    if (!cross || !reduces(tile)) return 0;
    return two_hop() ? topology.world - 1u : ring() ? 1u : topology.islands - 1u;
  }
  SM120_HD constexpr Push cross_push(uint32_t tile, uint32_t i) const {
    if (two_hop()) {
      const uint32_t dst = wrap(rank + 1u + i, topology.world);
      return Push{static_cast<uint8_t>(dst), Region::kCross, tile * topology.islands + island};
    }
    return partial_to(tile, wrap(island + 1u + i, topology.islands), island);
  }
  SM120_HD constexpr uint32_t cross_base(uint32_t tile) const {
    return (two_hop() ? tile : owned(tile)) * topology.islands;
  }
  // Whether the partial of island `from` arrives over the wire (false for the one I computed).
  SM120_HD constexpr bool polls_partial(uint32_t tile, uint32_t from) const {
    return from != island || !reduces(tile);
  }
  // Ring only: having received the partial of island `from`, pass it on unless the next island made
  // it.
  SM120_HD constexpr bool ring_forwards(uint32_t from) const {
    return ring() && wrap(island + 1u, topology.islands) != from;
  }
  SM120_HD constexpr Push ring_push(uint32_t tile, uint32_t from) const {
    return partial_to(tile, wrap(island + 1u, topology.islands), from);
  }
  // The rank whose store delivers the partial of island `from` to me.
  SM120_HD constexpr uint32_t partial_sender(uint32_t tile, uint32_t from) const {
    return owner_in(ring() ? wrap(island + topology.islands - 1u, topology.islands) : from, tile);
  }

  // --- gather ----------------------------------------------------------------------------------
  // Whether the finished tile comes to me over the wire; it lies at index `tile` of kGather.
  SM120_HD constexpr bool polls_result(uint32_t tile) const { return gather && !reduces(tile); }
  SM120_HD constexpr uint32_t gather_fanout(uint32_t tile) const {
    return gather && reduces(tile) ? owners - 1u : 0u;
  }
  SM120_HD constexpr Push gather_push(uint32_t tile, uint32_t i) const {
    const uint32_t next = wrap(lane + 1u + i, owners);
    const uint32_t dst = flat ? next : topology.member[begin + next];
    return Push{static_cast<uint8_t>(dst), Region::kGather, tile};
  }

  // Tile slots of a region that a call of `tiles` tiles may touch, counted from the region's start:
  // what the next call clears.
  SM120_HD constexpr uint32_t extent(Region region, uint32_t tiles) const {
    const uint32_t held = owned(tiles + owners - 1u);
    switch (region) {
      case Region::kReduce:
        return one_shot() ? tiles * topology.world : held * owners;
      case Region::kCross:
        return cross ? (two_hop() ? tiles : held) * topology.islands : 0u;
      default:
        return gather ? tiles : 0u;
    }
  }

 private:
  SM120_HD static constexpr uint32_t wrap(uint32_t value, uint32_t n) {
    return value >= n ? value - n : value;
  }
  SM120_HD constexpr Push partial_to(uint32_t tile, uint32_t target, uint32_t from) const {
    const uint32_t slot = quotient(tile, topology.size(target)) * topology.islands + from;
    return Push{static_cast<uint8_t>(owner_in(target, tile)), Region::kCross, slot};
  }
};

SM120_HD constexpr View make_view(const Plan& plan, int rank) {
  View v{};
  v.topology = plan.topology;
  v.schedule = plan.schedule;
  v.rank = static_cast<uint8_t>(rank);
  v.island = plan.topology.island_of[rank];
  for (uint32_t n = 2; n <= kMaxWorld; ++n) v.magic[n] = 0xFFFFFFFFu / n + 1u;
  v.flat = plan.schedule == Schedule::kOneShot || plan.schedule == Schedule::kTwoShot;
  v.begin = v.flat ? uint8_t{0} : plan.topology.begin[v.island];
  v.owners = v.flat ? plan.topology.world : static_cast<uint8_t>(plan.topology.size(v.island));
  v.source = static_cast<uint8_t>(plan.topology.position[rank] - v.begin);
  v.lane = v.flat ? v.rank : v.source;
  v.cross = !v.flat && plan.topology.islands > 1;
  v.gather =
      plan.schedule != Schedule::kOneShot && !(v.cross && plan.schedule == Schedule::kIslandTwoHop);
  return v;
}

// Bit r is set when `rank` stores into the slab of rank r for some tile below `tiles`.
constexpr uint32_t peers_written(const View& v, uint32_t tiles) {
  uint32_t mask = 0;
  for (uint32_t t = 0; t < tiles; ++t) {
    for (uint32_t i = 0; i < v.scatter_fanout(t); ++i) mask |= 1u << v.scatter_push(t, i).dst;
    for (uint32_t i = 0; i < v.cross_fanout(t); ++i) mask |= 1u << v.cross_push(t, i).dst;
    for (uint32_t i = 0; i < v.gather_fanout(t); ++i) mask |= 1u << v.gather_push(t, i).dst;
  }
  return mask;
}

// Tiles after which the pattern of owners repeats, for every island size up to 16.
inline constexpr uint32_t kOwnerPeriodMax = 240;

// Whether every rank writes to at most `limit` others (8 on CUDA). Above 8 ranks this leaves the
// island schedules only, and of those the partitions with few enough partners.
constexpr bool within_peer_limit(const Plan& plan, int limit) {
  for (int r = 0; r < plan.topology.world; ++r) {
    uint32_t mask = peers_written(make_view(plan, r), kOwnerPeriodMax);
    int peers = 0;
    for (; mask != 0; mask &= mask - 1) ++peers;
    if (peers > limit) return false;
  }
  return true;
}

}  // namespace sm120
