// SPDX-License-Identifier: Apache-2.0
#include "host/lanes.h"

#include <cmath>
#include <cstring>

// GCC picks the best version when the library is loaded. ThreadSanitizer cannot run before such
// resolvers.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(SM120_LANE_ATOMICS)
#define SM120_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SM120_CLONES
#endif

namespace sm120::lanes {
namespace {

// One lane of a slab. Aligned lanes of up to 4 bytes are read and written whole on every target.
template <class T>
SM120_HD T lane_load(const T* p) {
#if defined(SM120_LANE_ATOMICS)
  return __atomic_load_n(p, __ATOMIC_RELAXED);
#else
  return *p;
#endif
}
template <class T>
SM120_HD void lane_store(T* p, T value) {
#if defined(SM120_LANE_ATOMICS)
  __atomic_store_n(p, value, __ATOMIC_RELAXED);
#else
  *p = value;
#endif
}

// Keeps the compiler from reusing what it read from, or holding back what it wrote to, a slab.
SM120_HD void compiler_fence() { asm volatile("" ::: "memory"); }

template <Dtype D>
struct Format;
template <>
struct Format<Dtype::kBf16> {
  using Lane = uint16_t;
  static constexpr uint16_t kNan = kNan16;
  SM120_HD static float load(Lane v) { return bf16_to_float(v); }
  SM120_HD static Lane round(float v) { return float_to_bf16(v); }
  SM120_HD static Lane canonical(Lane v) { return canonical_bf16(v); }
};
template <>
struct Format<Dtype::kF16> {
  using Lane = uint16_t;
  static constexpr uint16_t kNan = kNan16;
  SM120_HD static float load(Lane v) { return f16_to_float(v); }
  SM120_HD static Lane round(float v) { return float_to_f16(v); }
  SM120_HD static Lane canonical(Lane v) { return canonical_f16(v); }
};
template <>
struct Format<Dtype::kF32> {
  using Lane = uint32_t;
  static constexpr uint32_t kNan = kNan32;
  SM120_HD static float load(Lane v) { return float_of(v); }
  SM120_HD static Lane round(float v) { return canonical_f32(bits_of(v)); }
  SM120_HD static Lane canonical(Lane v) { return canonical_f32(v); }
};

template <Dtype D>
using Lane = typename Format<D>::Lane;

// Calls `body` with the dtype as a compile-time constant.
template <class Body>
SM120_HD auto with_dtype(Dtype dtype, Body body) {
  switch (dtype) {
    case Dtype::kBf16:
      return body.template operator()<Dtype::kBf16>();
    case Dtype::kF16:
      return body.template operator()<Dtype::kF16>();
    default:
      return body.template operator()<Dtype::kF32>();
  }
}

SM120_HD Dtype dtype_of(Codec codec) {
  return codec == Codec::kBf16 ? Dtype::kBf16 : codec == Codec::kF16 ? Dtype::kF16 : Dtype::kF32;
}

template <class Element>
SM120_HD void push_int8(Element element, uint8_t* wire, uint32_t n) {
  for (uint32_t b = 0; b < int8_blocks(n); ++b) {
    const uint32_t first = b * kInt8Block;
    const uint32_t count = n - first < kInt8Block ? n - first : kInt8Block;
    float values[kInt8Block] = {};
    uint32_t amax = 0;
    for (uint32_t i = 0; i < count; ++i) {
      values[i] = element(first + i);
      const uint32_t magnitude = bits_of(values[i]) & 0x7FFFFFFFu;
      amax = magnitude > amax ? magnitude : amax;
    }
    const uint8_t scale = int8_scale(amax);
    const bool poison = scale == kInt8Poison;
    const float inverse = poison ? 0.0f : int8_inverse_step(scale);
    for (uint32_t i = 0; i < count; ++i) {
      lane_store(wire + kInt8Header + first + i,
                 poison ? uint8_t{kInt8CodeFlip} : int8_encode(values[i], inverse));
    }
    lane_store(wire + b, scale);
  }
}

template <class Sink>
SM120_HD void decode_int8(const uint8_t* wire, uint32_t n, Sink sink) {
  for (uint32_t b = 0; b < int8_blocks(n); ++b) {
    const uint8_t scale = lane_load(wire + b);
    const float step = scale == kInt8Poison ? float_of(kNan32) : int8_step(scale);
    const uint32_t first = b * kInt8Block;
    const uint32_t end = first + kInt8Block < n ? first + kInt8Block : n;
    for (uint32_t i = first; i < end; ++i) {
      sink(i, int8_decode(lane_load(wire + kInt8Header + i), step));
    }
  }
}

template <class Lane>
SM120_HD bool all_arrived(const Lane* wire, uint32_t n) {
  // The last lane tends to arrive last: look there first.
  constexpr Lane kMissing = static_cast<Lane>(~Lane{0});
  if (lane_load(wire + n - 1) == kMissing) return false;
  uint32_t missing = 0;
  for (uint32_t i = 0; i < n; ++i) missing |= lane_load(wire + i) == kMissing ? 1u : 0u;
  return missing == 0;
}

template <Dtype D>
SM120_HD void set_lanes(const Lane<D>* in, float* sum, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) sum[i] = Format<D>::load(lane_load(in + i));
}
template <Dtype D>
SM120_HD void add_lanes(const Lane<D>* in, float* sum, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) sum[i] += Format<D>::load(lane_load(in + i));
}

}  // namespace

SM120_CLONES void push(Codec codec, Dtype dtype, const void* source, void* wire, uint32_t n) {
  with_dtype(dtype, [&]<Dtype D>() __attribute__((always_inline)) {
    const auto* in = static_cast<const Lane<D>*>(source);
    if (codec == Codec::kInt8) {
      push_int8([&](uint32_t i) { return Format<D>::load(in[i]); }, static_cast<uint8_t*>(wire), n);
    } else {
      auto* out = static_cast<Lane<D>*>(wire);
      for (uint32_t i = 0; i < n; ++i) lane_store(out + i, Format<D>::canonical(in[i]));
    }
  });
  compiler_fence();
}

SM120_CLONES void push_floats(Codec codec, const float* source, void* wire, uint32_t n) {
  if (codec == Codec::kInt8) {
    push_int8([&](uint32_t i) { return source[i]; }, static_cast<uint8_t*>(wire), n);
  } else {
    with_dtype(dtype_of(codec), [&]<Dtype D>() __attribute__((always_inline)) {
      auto* out = static_cast<Lane<D>*>(wire);
      for (uint32_t i = 0; i < n; ++i) lane_store(out + i, Format<D>::round(source[i]));
    });
  }
  compiler_fence();
}

SM120_CLONES bool arrived(Codec codec, const void* wire, uint32_t n) {
  compiler_fence();
  bool all;
  if (codec == Codec::kInt8) {
    const auto* bytes = static_cast<const uint8_t*>(wire);
    all = all_arrived(bytes, int8_blocks(n)) && all_arrived(bytes + kInt8Header, n);
  } else if (codec == Codec::kF32) {
    all = all_arrived(static_cast<const uint32_t*>(wire), n);
  } else {
    all = all_arrived(static_cast<const uint16_t*>(wire), n);
  }
  compiler_fence();
  return all;
}

SM120_CLONES void set(Codec codec, const void* wire, float* sum, uint32_t n) {
  if (codec == Codec::kInt8) {
    decode_int8(static_cast<const uint8_t*>(wire), n, [&](uint32_t i, float v) { sum[i] = v; });
  } else {
    with_dtype(dtype_of(codec), [&]<Dtype D>() __attribute__((always_inline)) {
      set_lanes<D>(static_cast<const Lane<D>*>(wire), sum, n);
    });
  }
}

SM120_CLONES void add(Codec codec, const void* wire, float* sum, uint32_t n) {
  if (codec == Codec::kInt8) {
    decode_int8(static_cast<const uint8_t*>(wire), n, [&](uint32_t i, float v) { sum[i] += v; });
  } else {
    with_dtype(dtype_of(codec), [&]<Dtype D>() __attribute__((always_inline)) {
      add_lanes<D>(static_cast<const Lane<D>*>(wire), sum, n);
    });
  }
}

SM120_CLONES void set_user(Dtype dtype, const void* source, float* sum, uint32_t n) {
  with_dtype(dtype, [&]<Dtype D>() __attribute__((always_inline)) {
    const auto* in = static_cast<const Lane<D>*>(source);
    for (uint32_t i = 0; i < n; ++i) sum[i] = Format<D>::load(in[i]);
  });
}

SM120_CLONES void add_user(Dtype dtype, const void* source, float* sum, uint32_t n) {
  with_dtype(dtype, [&]<Dtype D>() __attribute__((always_inline)) {
    const auto* in = static_cast<const Lane<D>*>(source);
    for (uint32_t i = 0; i < n; ++i) sum[i] += Format<D>::load(in[i]);
  });
}

SM120_CLONES void add_floats(const float* part, float* sum, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) sum[i] += part[i];
}

SM120_CLONES void through(Codec codec, float* sum, uint32_t n) {
  if (codec == Codec::kInt8) {
    alignas(64) uint8_t wire[kInt8Header + kTile];
    push_int8([&](uint32_t i) { return sum[i]; }, wire, n);
    decode_int8(wire, n, [&](uint32_t i, float v) { sum[i] = v; });
  } else {
    with_dtype(dtype_of(codec), [&]<Dtype D>() __attribute__((always_inline)) {
      for (uint32_t i = 0; i < n; ++i) sum[i] = Format<D>::load(Format<D>::round(sum[i]));
    });
  }
}

SM120_CLONES void round(Dtype dtype, const float* sum, void* out, uint32_t n) {
  with_dtype(dtype, [&]<Dtype D>() __attribute__((always_inline)) {
    auto* lanes = static_cast<Lane<D>*>(out);
    for (uint32_t i = 0; i < n; ++i) lanes[i] = Format<D>::round(sum[i]);
  });
}

SM120_CLONES void clear(void* wire, uint64_t bytes) {
#if defined(SM120_LANE_ATOMICS)
  auto* lanes = static_cast<uint16_t*>(wire);
  for (uint64_t i = 0; i < bytes / 2; ++i) lane_store(lanes + i, uint16_t{0xFFFF});
#else
  memset(wire, kClearByte, bytes);
#endif
  compiler_fence();
}

SM120_CLONES void store(void* wire, const void* bytes, uint32_t count) {
#if defined(SM120_LANE_ATOMICS)
  for (uint32_t i = 0; i < count;) {
    if (count - i >= 4 && i % 4 == 0) {
      uint32_t lane;
      memcpy(&lane, static_cast<const char*>(bytes) + i, 4);
      lane_store(reinterpret_cast<uint32_t*>(static_cast<char*>(wire) + i), lane);
      i += 4;
    } else {
      uint16_t lane;
      memcpy(&lane, static_cast<const char*>(bytes) + i, 2);
      lane_store(reinterpret_cast<uint16_t*>(static_cast<char*>(wire) + i), lane);
      i += 2;
    }
  }
#else
  memcpy(wire, bytes, count);
#endif
  compiler_fence();
}

SM120_CLONES void fetch(const void* wire, void* bytes, uint32_t count) {
  compiler_fence();
#if defined(SM120_LANE_ATOMICS)
  for (uint32_t i = 0; i < count; i += 2) {
    const uint16_t lane =
        lane_load(reinterpret_cast<const uint16_t*>(static_cast<const char*>(wire) + i));
    memcpy(static_cast<char*>(bytes) + i, &lane, 2);
  }
#else
  memcpy(bytes, wire, count);
#endif
}

SM120_CLONES float residual_add(Dtype dtype, const void* sum, const void* residual,
                                void* residual_out, float* y, bool rounded, uint32_t n) {
  // Sixteen running sums, then a tree: the same order at every vector width.
  float squares[16] = {};
  with_dtype(dtype, [&]<Dtype D>() __attribute__((always_inline)) {
    using F = Format<D>;
    const auto* a = static_cast<const Lane<D>*>(sum);
    const auto* b = static_cast<const Lane<D>*>(residual);
    auto* out = static_cast<Lane<D>*>(residual_out);
    for (uint32_t i = 0; i < n; ++i) {
      const float exact = F::load(a[i]) + F::load(b[i]);
      const Lane<D> kept = F::round(exact);
      out[i] = kept;
      y[i] = rounded ? F::load(kept) : exact;
    }
  });
  const uint32_t whole = n / 16 * 16;
  for (uint32_t i = 0; i < whole; i += 16) {
    for (uint32_t j = 0; j < 16; ++j) squares[j] += y[i + j] * y[i + j];
  }
  for (uint32_t i = whole; i < n; ++i) squares[i - whole] += y[i] * y[i];
  for (uint32_t width = 8; width > 0; width /= 2) {
    for (uint32_t j = 0; j < width; ++j) squares[j] += squares[j + width];
  }
  return squares[0];
}

SM120_CLONES void norm(Dtype dtype, const float* y, float scale, const void* weight,
                       bool weight_f32, bool gemma, void* out, uint32_t n) {
  const float base = gemma ? 1.0f : 0.0f;
  with_dtype(dtype, [&]<Dtype D>() __attribute__((always_inline)) {
    using F = Format<D>;
    auto* lanes = static_cast<Lane<D>*>(out);
    if (weight_f32) {
      const auto* w = static_cast<const float*>(weight);
      for (uint32_t i = 0; i < n; ++i) lanes[i] = F::round(y[i] * scale * (base + w[i]));
    } else {
      const auto* w = static_cast<const Lane<D>*>(weight);
      for (uint32_t i = 0; i < n; ++i) lanes[i] = F::round(y[i] * scale * (base + F::load(w[i])));
    }
  });
}

SM120_CLONES float quantise_e4m3(Dtype dtype, const void* row, uint8_t* codes, uint32_t n) {
  return with_dtype(dtype, [&]<Dtype D>() __attribute__((always_inline)) {
    const auto* in = static_cast<const Lane<D>*>(row);
    // A NaN compares above every number as an integer, so one NaN makes the scale NaN.
    uint32_t amax = 0;
    for (uint32_t i = 0; i < n; ++i) {
      const uint32_t magnitude = bits_of(Format<D>::load(in[i])) & 0x7FFFFFFFu;
      amax = magnitude > amax ? magnitude : amax;
    }
    const float scale = float_of(amax) / kE4m3Max;
    const float inverse = scale == 0.0f ? 0.0f : 1.0f / scale;
    for (uint32_t i = 0; i < n; ++i) codes[i] = float_to_e4m3(Format<D>::load(in[i]) * inverse);
    return scale;
  });
}

void fill_nan(Dtype dtype, void* out, uint64_t n) {
  with_dtype(dtype, [&]<Dtype D>() {
    auto* lanes = static_cast<Lane<D>*>(out);
    for (uint64_t i = 0; i < n; ++i) lanes[i] = Format<D>::kNan;
  });
}

}  // namespace sm120::lanes
