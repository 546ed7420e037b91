// SPDX-License-Identifier: Apache-2.0
// The canonical sum: fp32, ranks ascending inside an island, island partials ascending, one
// rounding at the end. With several islands each partial is first dressed in the plan's partial
// codec (and undressed), even where it does not travel; with INT8 the contributions and the result
// go through the wire format too. So every schedule, message size and CTA count gives the same bits
// on every rank.
#pragma once

#include "codec.h"
#include "islands.h"

namespace sm120 {

// One element through a 16- or 32-bit codec: the value a receiver decodes.
SM120_HD float through_wire(Codec codec, float value) {
  return codec == Codec::kBf16  ? bf16_to_float(float_to_bf16(value))
         : codec == Codec::kF16 ? f16_to_float(float_to_f16(value))
                                : float_canonical(value);
}

// fp32 sum of the values `get(i)`, i in [0, count), in ascending order and starting from the first
// (not from +0, so that a sum of negative zeros keeps its sign).
template <class Get>
SM120_HD float ascending_sum(uint32_t count, Get get) {
  float sum = get(0u);
  for (uint32_t i = 1; i < count; ++i) sum += get(i);
  return sum;
}

// Canonical sum of one element for codecs without blocks. `get(i)` is the contribution of rank
// topology.member[i]; the result is not yet rounded to the dtype.
template <class Get>
SM120_HD float canonical_sum(const Topology& topology, Codec partial, Get get) {
  float total = 0.0f;
  for (uint32_t island = 0; island < topology.islands; ++island) {
    const uint32_t begin = topology.begin[island];
    float part = ascending_sum(topology.size(island), [&](uint32_t i) { return get(begin + i); });
    if (topology.islands > 1) part = through_wire(partial, part);
    total = island == 0 ? part : total + part;
  }
  return total;
}

// Round a finished element to the dtype: 16-bit pattern in the low half, or fp32 bits.
SM120_HD uint32_t round_to(Dtype dtype, float value) {
  return dtype == Dtype::kBf16  ? float_to_bf16(value)
         : dtype == Dtype::kF16 ? float_to_f16(value)
                                : canonical_f32(bits_of(value));
}

}  // namespace sm120
