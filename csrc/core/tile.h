// SPDX-License-Identifier: Apache-2.0
// The tile: 256 elements of one row, the unit of ownership, sending and quantising.
#pragma once

#include "hd.h"

namespace sm120 {

inline constexpr uint32_t kTile = 256;      // elements
inline constexpr uint32_t kHiddenUnit = 8;  // hidden sizes are multiples of this: 16 bytes of bf16

// Shape of one call. Tile t covers row t / tiles_per_row, columns from (t % tiles_per_row) * 256.
struct Shape {
  uint32_t rows;
  uint32_t hidden;
  uint32_t tiles_per_row;

  SM120_HD constexpr uint32_t tiles() const { return rows * tiles_per_row; }
};

struct Span {
  uint32_t row;
  uint32_t column;
  uint32_t length;  // elements: 256, or less in the last tile of a row
};

SM120_HD constexpr Shape make_shape(uint32_t rows, uint32_t hidden) {
  return Shape{rows, hidden, (hidden + kTile - 1) / kTile};
}

SM120_HD constexpr Span span_of(const Shape& shape, uint32_t tile) {
  const uint32_t row = tile / shape.tiles_per_row;
  const uint32_t column = (tile - row * shape.tiles_per_row) * kTile;
  const uint32_t left = shape.hidden - column;
  return Span{row, column, left < kTile ? left : kTile};
}

// Element offset of a tile in a contiguous [rows, hidden] tensor.
SM120_HD constexpr uint64_t element_offset(const Shape& shape, const Span& span) {
  return static_cast<uint64_t>(span.row) * shape.hidden + span.column;
}

// CTA c works on tiles [cta_begin(c), cta_begin(c + 1)): the same on every rank. Runs are
// contiguous so that each CTA holds tiles of every owner, whatever the number of CTAs.
SM120_HD constexpr uint32_t cta_begin(uint32_t tiles, uint32_t ctas, uint32_t c) {
  return static_cast<uint32_t>(static_cast<uint64_t>(tiles) * c / ctas);
}

}  // namespace sm120
