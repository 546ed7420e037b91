// SPDX-License-Identifier: Apache-2.0
// bf16, fp16, fp32 and FP8 E4M3 as bits, with round-to-nearest-even and one canonical NaN per
// format.
#pragma once

#include "hd.h"

namespace sm120 {

enum class Dtype : uint8_t { kF32 = 0, kBf16 = 1, kF16 = 2 };

SM120_HD constexpr uint32_t dtype_bytes(Dtype dtype) { return dtype == Dtype::kF32 ? 4 : 2; }

// The NaN that replaces every NaN before it is sent or stored. It is not the clear pattern (all
// ones).
inline constexpr uint16_t kNan16 = 0x7FFF;
inline constexpr uint32_t kNan32 = 0x7FFFFFFF;

SM120_HD uint16_t canonical_bf16(uint16_t v) {
  return (v & 0x7FFF) > 0x7F80 ? uint16_t{0x7FFF} : v;
}
SM120_HD uint16_t canonical_f16(uint16_t v) { return (v & 0x7FFF) > 0x7C00 ? uint16_t{0x7FFF} : v; }
SM120_HD uint32_t canonical_f32(uint32_t v) {
  return (v & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFFFFFu : v;
}

SM120_HD float bf16_to_float(uint16_t v) { return float_of(static_cast<uint32_t>(v) << 16); }

SM120_HD uint16_t float_to_bf16(float value) {
  const uint32_t u = bits_of(value);
  const uint32_t rounded = (u + 0x7FFFu + ((u >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>((u & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FFFu : rounded);
}

SM120_HD float f16_to_float(uint16_t v) {
  // The multiplication by 2^112 re-biases normals and renormalises subnormals, both exactly.
  const uint32_t magnitude = static_cast<uint32_t>(v & 0x7FFF) << 13;
  const uint32_t scaled = bits_of(float_of(magnitude) * float_of(0x77800000u));
  const uint32_t special = magnitude | 0x7F800000u;
  const uint32_t sign = static_cast<uint32_t>(v & 0x8000) << 16;
  return float_of(sign | (magnitude >= 0x0F800000u ? special : scaled));
}

SM120_HD uint16_t float_to_f16(float value) {
  const uint32_t u = bits_of(value);
  const uint32_t magnitude = u & 0x7FFFFFFFu;
  const uint32_t sign = (u >> 16) & 0x8000u;
  // Adding 0.5 (one unit = 2^-24) lets the FPU round a result that is subnormal in fp16.
  const uint32_t subnormal = bits_of(float_of(magnitude) + float_of(0x3F000000u)) - 0x3F000000u;
  const uint32_t normal = (magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  uint32_t h = magnitude < 0x38800000u ? subnormal : normal;
  h = magnitude >= 0x477FF000u ? 0x7C00u : h;
  return static_cast<uint16_t>(magnitude > 0x7F800000u ? 0x7FFFu : (sign | h));
}

SM120_HD float float_canonical(float value) { return float_of(canonical_f32(bits_of(value))); }

// FP8 E4M3 (finite only, largest 448), round-to-nearest-even, saturating, NaN -> 0x7F: what
// PyTorch's float8_e4m3fn conversion gives after a clamp to +-448.
inline constexpr float kE4m3Max = 448.0f;

SM120_HD uint8_t float_to_e4m3(float value) {
  const uint32_t u = bits_of(value);
  const uint32_t magnitude = u & 0x7FFFFFFFu;
  const uint32_t sign = (u >> 24) & 0x80u;
  // Adding 16384 (one unit = 2^-9) rounds what is subnormal in E4M3 (below 2^-6).
  const uint32_t subnormal = bits_of(float_of(magnitude) + float_of(0x46800000u)) - 0x46800000u;
  const uint32_t normal = (magnitude - 0x3C000000u + 0x7FFFFu + ((magnitude >> 20) & 1u)) >> 20;
  uint32_t e = magnitude < 0x3C800000u ? subnormal : normal;
  e = magnitude > 0x43E00000u ? 0x7Eu : e;
  return static_cast<uint8_t>(magnitude > 0x7F800000u ? 0x7Fu : (sign | e));
}

SM120_HD float e4m3_to_float(uint8_t v) {
  const uint32_t magnitude = static_cast<uint32_t>(v & 0x7F);
  // 2^120 re-biases exponent 7 to 127, and renormalises subnormals, both exactly.
  const uint32_t scaled = bits_of(float_of(magnitude << 20) * float_of(0x7B800000u));
  const uint32_t sign = static_cast<uint32_t>(v & 0x80) << 24;
  return float_of(sign | (magnitude == 0x7F ? kNan32 : scaled));
}

}  // namespace sm120
