// SPDX-License-Identifier: Apache-2.0
// Loops over the elements of one tile or row: the only code that touches another rank's memory.
//
// Compiled for several x86 levels and chosen at load. Built with SM120_LANE_ATOMICS
// (ThreadSanitizer), all access to slabs is by relaxed atomics of one lane, which is exactly what
// the protocol promises to need.
#pragma once

#include <cstdint>

#include "core/codec.h"

namespace sm120::lanes {

// Encode `n` elements of a user tensor and store them as a tile on the wire.
void push(Codec codec, Dtype dtype, const void* source, void* wire, uint32_t n);

// Encode `n` fp32 values as a tile.
void push_floats(Codec codec, const float* source, void* wire, uint32_t n);

// Whether every lane of a tile has arrived.
bool arrived(Codec codec, const void* wire, uint32_t n);

// Decode a tile into fp32 (`set`), or add it to fp32 (`add`).
void set(Codec codec, const void* wire, float* sum, uint32_t n);
void add(Codec codec, const void* wire, float* sum, uint32_t n);

// The same for elements of a user tensor, as the receiver of their lossless wire form would see
// them.
void set_user(Dtype dtype, const void* source, float* sum, uint32_t n);
void add_user(Dtype dtype, const void* source, float* sum, uint32_t n);

void add_floats(const float* part, float* sum, uint32_t n);

// sum = decode(encode(sum)): what a receiver of the encoded tile would hold.
void through(Codec codec, float* sum, uint32_t n);

// Round fp32 to the dtype.
void round(Dtype dtype, const float* sum, void* out, uint32_t n);

// Set `bytes` of a slab to the clear pattern.
void clear(void* wire, uint64_t bytes);

// Store bytes that are already in wire form, in units of 2 bytes or more, into a slab.
void store(void* wire, const void* bytes, uint32_t count);

// Copy `count` bytes of wire form out of a slab.
void fetch(const void* wire, void* bytes, uint32_t count);

// y = float(round(sum)) + float(residual); residual_out = round(y), where `sum` already has the
// dtype. Keeps y for the norm, rounded to the dtype if `rounded`. Returns the sum of squares of y,
// in an order fixed by the element index alone. `sum` may be `residual_out`.
float residual_add(Dtype dtype, const void* sum, const void* residual, void* residual_out, float* y,
                   bool rounded, uint32_t n);

// out = round(y * scale * weight), with (1 + weight) if `gemma`; weight in fp32 or in the dtype.
void norm(Dtype dtype, const float* y, float scale, const void* weight, bool weight_f32, bool gemma,
          void* out, uint32_t n);

// Per-token FP8 E4M3 of a row in the dtype: returns scale = amax / 448 and writes the codes.
float quantise_e4m3(Dtype dtype, const void* row, uint8_t* codes, uint32_t n);

void fill_nan(Dtype dtype, void* out, uint64_t n);

}  // namespace sm120::lanes
