// SPDX-License-Identifier: Apache-2.0
// Islands: a partition of the ranks into groups that share a switch or a socket.
#pragma once

#include "hd.h"

namespace sm120 {

inline constexpr int kMaxWorld = 16;
inline constexpr int kMaxPeers = 8;  // a CUDA device maps at most 8 peers

// Plain data, passed to kernels by value. Members of an island ascend; islands are ordered by their
// lowest rank, so the way a partition was written never changes the canonical sum.
struct Topology {
  uint8_t world;
  uint8_t islands;
  uint8_t island_of[kMaxWorld];
  uint8_t begin[kMaxWorld + 1];  // island i holds member[begin[i]] .. member[begin[i + 1] - 1]
  uint8_t member[kMaxWorld];     // ranks in canonical order
  uint8_t position[kMaxWorld];   // rank -> its index in `member`

  SM120_HD constexpr uint32_t size(uint32_t island) const {
    return static_cast<uint32_t>(begin[island + 1] - begin[island]);
  }
  SM120_HD constexpr uint32_t smallest() const {
    uint32_t least = world;
    for (uint32_t i = 0; i < islands; ++i) least = size(i) < least ? size(i) : least;
    return least;
  }
  SM120_HD constexpr uint32_t largest() const {
    uint32_t most = 0;
    for (uint32_t i = 0; i < islands; ++i) most = size(i) > most ? size(i) : most;
    return most;
  }
};

// Build from a label per rank; equal labels share an island. `label` holds `world` entries.
SM120_HD constexpr Topology make_topology(int world, const uint8_t* label) {
  Topology t{};
  t.world = static_cast<uint8_t>(world);
  uint8_t filled = 0;
  bool placed[kMaxWorld] = {};
  for (int first = 0; first < world; ++first) {
    if (placed[first]) continue;
    for (int r = first; r < world; ++r) {
      if (placed[r] || label[r] != label[first]) continue;
      placed[r] = true;
      t.island_of[r] = t.islands;
      t.position[r] = filled;
      t.member[filled++] = static_cast<uint8_t>(r);
    }
    t.begin[++t.islands] = filled;
  }
  return t;
}

SM120_HD constexpr Topology flat_topology(int world) {
  const uint8_t label[kMaxWorld] = {};
  return make_topology(world, label);
}

enum class IslandsError : uint8_t {
  kNone = 0,
  kWorld,     // world outside 1..16
  kSyntax,    // not of the form "0-3;4-7" or "0,1;2,3"
  kRange,     // a rank outside the world
  kRepeated,  // a rank named twice
  kMissing,   // a rank named nowhere
};

struct ParsedIslands {
  Topology topology;
  IslandsError error;
  int where;  // character index for kSyntax, rank for the others
};

// Parse "0-3;4-7" (ranges), "0,1;2,3" (lists) or a mixture. An empty text is one island.
constexpr ParsedIslands parse_islands(int world, const char* text, int length) {
  if (world < 1 || world > kMaxWorld) return {Topology{}, IslandsError::kWorld, world};
  if (length == 0) return {flat_topology(world), IslandsError::kNone, 0};
  uint8_t label[kMaxWorld] = {};
  bool seen[kMaxWorld] = {};
  uint8_t island = 0;
  int i = 0;
  auto number = [&](int& out) {
    const int start = i;
    out = 0;
    while (i < length && text[i] >= '0' && text[i] <= '9' && i - start < 4) {
      out = out * 10 + (text[i++] - '0');
    }
    return i > start;
  };
  while (true) {
    int low = 0;
    if (!number(low)) return {Topology{}, IslandsError::kSyntax, i};
    int high = low;
    if (i < length && text[i] == '-') {
      ++i;
      if (!number(high) || high < low) return {Topology{}, IslandsError::kSyntax, i};
    }
    for (int r = low; r <= high; ++r) {
      if (r >= world) return {Topology{}, IslandsError::kRange, r};
      if (seen[r]) return {Topology{}, IslandsError::kRepeated, r};
      seen[r] = true;
      label[r] = island;
    }
    if (i == length) break;
    if (text[i] == ';') {
      ++island;
    } else if (text[i] != ',') {
      return {Topology{}, IslandsError::kSyntax, i};
    }
    ++i;
  }
  for (int r = 0; r < world; ++r) {
    if (!seen[r]) return {Topology{}, IslandsError::kMissing, r};
  }
  return {make_topology(world, label), IslandsError::kNone, 0};
}

}  // namespace sm120
