// SPDX-License-Identifier: Apache-2.0
// How a tile looks on the wire. Every codec carries its own validity: memory is cleared to all
// ones, and no lane of a valid tile is all ones.
//   bf16, fp16  a 16-bit lane is "not arrived" while it is 0xFFFF     (needs 2-byte store
//   atomicity) fp32        a 32-bit lane is "not arrived" while it is 0xFFFFFFFF (needs 4-byte
//   store atomicity) INT8        16 header bytes (8 scales, 8 zeros), then a byte per element; each
//   byte is "not arrived"
//               while it is 0xFF. Blocks of 32 share a scale 2^(s - 127); a code is stored as
//               code ^ 0x7F, so the never-used code -128 (0x80) is the one that reads 0xFF.
#pragma once

#include "numeric.h"
#include "tile.h"

namespace sm120 {

enum class Codec : uint8_t { kF32 = 0, kBf16 = 1, kF16 = 2, kInt8 = 3 };

inline constexpr uint8_t kClearByte = 0xFF;
inline constexpr uint32_t kInt8Block = 32;
inline constexpr uint32_t kInt8Header = 16;   // bytes
inline constexpr uint8_t kInt8Poison = 0xFE;  // scale of a block that holds a NaN or an infinity
inline constexpr uint8_t kInt8CodeFlip = 0x7F;

SM120_HD constexpr Codec lossless(Dtype dtype) {
  return dtype == Dtype::kF32 ? Codec::kF32 : dtype == Dtype::kBf16 ? Codec::kBf16 : Codec::kF16;
}

// Bytes that cross the wire for a tile of `length` elements: a multiple of 16.
SM120_HD constexpr uint32_t wire_bytes(Codec codec, uint32_t length) {
  return codec == Codec::kInt8  ? kInt8Header + round_up(length, 16u)
         : codec == Codec::kF32 ? length * 4
                                : length * 2;
}

// Distance between tiles in a region.
SM120_HD constexpr uint32_t wire_stride(Codec codec) { return wire_bytes(codec, kTile); }

// Bytes whose validity a receiver must check (the INT8 header's scales are checked apart).
SM120_HD constexpr uint32_t int8_blocks(uint32_t length) {
  return (length + kInt8Block - 1) / kInt8Block;
}

SM120_HD constexpr bool arrived16(uint16_t lane) { return lane != 0xFFFF; }
SM120_HD constexpr bool arrived32(uint32_t lane) { return lane != 0xFFFFFFFFu; }
SM120_HD constexpr bool arrived8(uint8_t lane) { return lane != 0xFF; }

// Scale byte of a block from the largest magnitude in it (as float bits, sign cleared). The scale
// is the smallest power of two for which the largest code rounds to at most 127; never below
// 2^-126.
SM120_HD constexpr uint8_t int8_scale(uint32_t amax_bits) {
  if (amax_bits >= 0x7F800000u) return kInt8Poison;
  const uint32_t exponent = amax_bits >> 23;
  const uint32_t carry = (amax_bits & 0x7FFFFFu) >= 0x7F0000u ? 1u : 0u;
  const uint32_t scale = exponent + carry;
  return static_cast<uint8_t>(scale > 7 ? scale - 6 : 1);
}

SM120_HD float int8_step(uint8_t scale) { return float_of(static_cast<uint32_t>(scale) << 23); }

// 1 / int8_step, exact: 2^(127 - s) needs biased exponent 254 - s, at least 5 for s <= 249.
SM120_HD float int8_inverse_step(uint8_t scale) {
  return float_of(static_cast<uint32_t>(254 - scale) << 23);
}

// Wire byte of one element of a block with this scale (not kInt8Poison: those codes are all 0).
SM120_HD uint8_t int8_encode(float value, float inverse_step) {
  // Adding 1.5 * 2^23 rounds to an integer, half to even, and leaves it in the low mantissa bits.
  const float shifted = value * inverse_step + 12582912.0f;
  return static_cast<uint8_t>((bits_of(shifted) & 0xFFu) ^ kInt8CodeFlip);
}

SM120_HD float int8_decode(uint8_t wire, float step) {
  return static_cast<float>(static_cast<int8_t>(wire ^ kInt8CodeFlip)) * step;
}

}  // namespace sm120
