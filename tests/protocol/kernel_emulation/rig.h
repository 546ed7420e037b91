// SPDX-License-Identifier: Apache-2.0
// Ranks on a CPU: every rank a stream of kernels, every CUDA thread a fiber, in random order, with
// stores that arrive late (ptx.cuh). Sums must equal the canonical sum of core/sum.h to the bit.
#pragma once

#include <algorithm>

#include "core/sum.h"
#include "cuda/params.h"
#include "cuda/ptx.cuh"

namespace rig {

using namespace sm120;

struct Call {
  Dtype dtype;
  Output out;
  Quant quant;
  Schedule schedule;
  uint32_t rows, hidden, ctas;
  bool gemma, weight_f32;
  Codec codec, partial;
};

struct Rank {
  std::vector<char> slab;
  std::vector<CtaState> states{kMaxCtas};
  uint32_t claim = 0;
  FlightRecord flight{};
  uint32_t call = 0;  // being run, or calls.size()
  bool running = false;
  Params p{};
  std::vector<std::unique_ptr<emulation::Cta>> ctas;
  std::vector<char> x, residual, residual_out, out;
  std::vector<float> scale;
  std::vector<std::vector<char>> shared, kept;  // per CTA: static and dynamic shared memory
};

inline Topology topology;
inline Layout layout;
inline std::vector<Call> calls;
inline std::vector<Rank> ranks;
inline std::vector<std::vector<std::vector<char>>> inputs;  // [call][rank]
inline std::vector<std::vector<char>> residuals, weights;
inline std::vector<std::vector<float>> sums;  // [call], once some rank has ended it
inline uint32_t failures = 0;
inline int missing = -1;  // a rank that never calls

inline uint32_t bits_at(const std::vector<char>& v, Dtype dtype, uint64_t i) {
  return dtype == Dtype::kF32 ? emulation::load<uint32_t>(v.data() + i * 4)
                              : emulation::load<uint16_t>(v.data() + i * 2);
}
inline float value_of(Dtype dtype, uint32_t bits) {
  return dtype == Dtype::kF32    ? float_of(bits)
         : dtype == Dtype::kBf16 ? bf16_to_float(static_cast<uint16_t>(bits))
                                 : f16_to_float(static_cast<uint16_t>(bits));
}
inline float value_at(const std::vector<char>& v, Dtype dtype, uint64_t i) {
  return value_of(dtype, bits_at(v, dtype, i));
}
inline float rounded(Dtype dtype, float value) { return value_of(dtype, round_to(dtype, value)); }

inline std::vector<char> random_tensor(Dtype dtype, uint64_t count, bool specials) {
  std::normal_distribution<float> normal(0.0f, 3.0f);
  std::vector<char> v(count * dtype_bytes(dtype));
  for (uint64_t i = 0; i < count; ++i) {
    uint32_t bits = round_to(dtype, normal(emulation::chance));
    const uint64_t dice = specials ? emulation::chance() % 50 : 99;
    if (dice == 0) bits = dtype == Dtype::kF32 ? 0xFFFFFFFFu : 0xFFFFu;  // a NaN, all ones
    if (dice == 1) bits = dtype == Dtype::kF32 ? 0x80000000u : 0x8000u;
    if (dice == 2)
      bits = dtype == Dtype::kF32 ? 0x7F800000u : dtype == Dtype::kBf16 ? 0x7F80u : 0x7C00u;
    memcpy(v.data() + i * dtype_bytes(dtype), &bits, dtype_bytes(dtype));
  }
  return v;
}

// Append a call with random data.
inline void add(const Call& c) {
  const uint64_t elements = static_cast<uint64_t>(c.rows) * c.hidden;
  calls.push_back(c);
  inputs.emplace_back();
  for (size_t r = 0; r < ranks.size(); ++r)
    inputs.back().push_back(random_tensor(c.dtype, elements, c.out == Output::kSum));
  residuals.push_back(random_tensor(c.dtype, elements, false));
  weights.push_back(random_tensor(c.weight_f32 ? Dtype::kF32 : c.dtype, c.hidden, false));
}

// Values through the wire as a receiver decodes them; INT8 in blocks of 32 of a row.
inline void through(Codec codec, uint32_t hidden, std::vector<float>& v) {
  if (codec != Codec::kInt8) {
    for (float& f : v) f = through_wire(codec, f);
    return;
  }
  for (size_t row = 0; row < v.size(); row += hidden) {
    for (size_t begin = row; begin < row + hidden; begin += 32) {
      const size_t end = std::min(begin + 32, row + hidden);
      uint32_t most = 0;
      for (size_t i = begin; i < end; ++i) most = std::max(most, bits_of(v[i]) & 0x7FFFFFFFu);
      const uint8_t scale = int8_scale(most);
      for (size_t i = begin; i < end; ++i) {
        v[i] = scale == kInt8Poison
                   ? float_of(kNan32)
                   : int8_decode(int8_encode(v[i], int8_inverse_step(scale)), int8_step(scale));
      }
    }
  }
}

// The canonical sum of a call, rounded to its dtype.
inline const std::vector<float>& expected(uint32_t call) {
  sums.resize(calls.size());
  std::vector<float>& total = sums[call];
  if (!total.empty()) return total;
  const Call& c = calls[call];
  const uint64_t count = static_cast<uint64_t>(c.rows) * c.hidden;
  for (uint32_t island = 0; island < topology.islands; ++island) {
    std::vector<float> part;
    for (uint32_t i = topology.begin[island]; i < topology.begin[island + 1]; ++i) {
      std::vector<float> x(count);
      for (uint64_t e = 0; e < count; ++e)
        x[e] = value_at(inputs[call][topology.member[i]], c.dtype, e);
      if (c.codec == Codec::kInt8) through(c.codec, c.hidden, x);
      if (part.empty()) {
        part = x;
      } else {
        for (uint64_t e = 0; e < count; ++e) part[e] += x[e];
      }
    }
    if (topology.islands > 1) through(c.partial, c.hidden, part);
    if (total.empty()) {
      total = part;
    } else {
      for (uint64_t e = 0; e < count; ++e) total[e] += part[e];
    }
  }
  if (c.codec == Codec::kInt8) through(c.codec, c.hidden, total);
  for (float& f : total) f = rounded(c.dtype, f);
  return total;
}

inline void enter() {
  emulation::current->body();
  emulation::current->ended = true;
  --emulation::current->cta->alive;
  emulation::yield();
}

// What every kernel is given; geometry and what it touches are the caller's.
inline Params& prepare(uint32_t index) {
  Rank& rank = ranks[index];
  const Call& c = calls[rank.call];
  const uint64_t count = static_cast<uint64_t>(c.rows) * c.hidden;
  rank.x = inputs[rank.call][index];
  rank.residual = residuals[rank.call];
  rank.out.assign(count * 4, 0x11);
  rank.residual_out.assign(count * 4, 0x11);
  rank.scale.assign(count, -1.0f);
  Params& p = rank.p = Params{};
  p.x = rank.x.data(), p.residual = rank.residual.data(), p.weight = weights[rank.call].data();
  p.out = rank.out.data(), p.residual_out = rank.residual_out.data(), p.scale = rank.scale.data();
  p.state = rank.states.data(), p.claim = &rank.claim, p.flight = &rank.flight;
  p.rows = c.rows, p.hidden = c.hidden,
  p.tiles_per_row = make_shape(c.rows, c.hidden).tiles_per_row;
  p.world = topology.world, p.rank = index;
  p.slot0 = static_cast<uint32_t>(layout.slot(0));
  p.slot_bytes = static_cast<uint32_t>(layout.slot_bytes);
  p.cross_offset = static_cast<uint32_t>(layout.offset[1]);
  p.gather_offset = static_cast<uint32_t>(layout.offset[2]);
  p.eps = 1e-6f, p.inverse_hidden = 1.0f / static_cast<float>(c.hidden);
  p.op = static_cast<uint8_t>(c.out), p.dtype = static_cast<uint8_t>(c.dtype);
  p.codec = static_cast<uint8_t>(c.codec), p.partial = static_cast<uint8_t>(c.partial);
  p.quant = c.out == Output::kFp8 ? c.quant : Quant::kNone;
  p.gemma = c.gemma, p.weight_f32 = c.weight_f32;
  // The clock moves at every look of any warp, so a wait grows with the ranks and their peers.
  p.timeout_units = missing >= 0 ? 500 : 5'000 * p.world * p.world;
  for (size_t r = 0; r < ranks.size(); ++r) p.peer[r] = ranks[r].slab.data();
  return p;
}

// Launch `run(rank, cta)` in p.ctas CTAs.
inline void start(Rank& rank, uint32_t threads, size_t shared, size_t kept,
                  void (*run)(Rank*, uint32_t)) {
  const uint32_t ctas = rank.p.ctas;
  rank.ctas.clear();
  // As a GPU leaves shared memory: full of something else.
  rank.shared.assign(ctas, std::vector<char>(shared, 0x55));
  rank.kept.assign(ctas, std::vector<char>(kept, 0x55));
  for (uint32_t i = 0; i < ctas; ++i) {
    auto cta = std::make_unique<emulation::Cta>();
    cta->index = i, cta->threads = cta->alive = threads, cta->grid = ctas;
    cta->warps.resize(threads / 32);
    for (uint32_t t = 0; t < threads; ++t) {
      auto fiber = std::make_unique<emulation::Fiber>();
      fiber->stack.reset(new char[32 << 10]);
      fiber->cta = cta.get(), fiber->thread = t;
      fiber->body = [run, r = &rank, i] { run(r, i); };
      getcontext(&fiber->context);
      fiber->context.uc_stack.ss_sp = fiber->stack.get();
      fiber->context.uc_stack.ss_size = 32 << 10;
      fiber->context.uc_link = nullptr;
      makecontext(&fiber->context, enter, 0);
      cta->fibers.push_back(std::move(fiber));
    }
    rank.ctas.push_back(std::move(cta));
  }
  rank.running = true;
}

inline void complain(uint32_t index, const char* what, uint64_t at, double got, double right) {
  const Call& c = calls[ranks[index].call];
  if (++failures > 5) return;
  printf(
      "WRONG %s: rank %u call %u (%u x %u, dtype %d, codec %d, schedule %d) element %lu: %g, not "
      "%g\n",
      what, index, ranks[index].call, c.rows, c.hidden, static_cast<int>(c.dtype),
      static_cast<int>(c.codec), static_cast<int>(c.schedule), at, got, right);
}

inline void verify(uint32_t index) {
  Rank& rank = ranks[index];
  const Call& c = calls[rank.call];
  const uint64_t count = static_cast<uint64_t>(c.rows) * c.hidden;
  const std::vector<float>& sum = expected(rank.call);
  std::vector<float> y(count);
  for (uint64_t i = 0; i < count; ++i) {
    if (c.out == Output::kSum) {
      if (bits_at(rank.out, c.dtype, i) != round_to(c.dtype, sum[i])) {
        complain(index, "sum", i, value_at(rank.out, c.dtype, i), sum[i]);
      }
      continue;
    }
    const float together = sum[i] + value_at(residuals[rank.call], c.dtype, i);
    if (bits_at(rank.residual_out, c.dtype, i) != round_to(c.dtype, together)) {
      complain(index, "residual", i, value_at(rank.residual_out, c.dtype, i), together);
    }
    y[i] = rounded(c.dtype, together);
  }
  if (c.out == Output::kSum) return;
  for (uint32_t row = 0; row < c.rows; ++row) {
    double squares = 0;
    for (uint32_t i = 0; i < c.hidden; ++i)
      squares += static_cast<double>(y[row * c.hidden + i]) * y[row * c.hidden + i];
    const double rstd = 1.0 / std::sqrt(squares / c.hidden + 1e-6);
    for (uint32_t i = 0; i < c.hidden; ++i) {
      const uint64_t at = static_cast<uint64_t>(row) * c.hidden + i;
      const float w = value_at(weights[rank.call], c.weight_f32 ? Dtype::kF32 : c.dtype, i) +
                      (c.gemma ? 1.0f : 0.0f);
      const double exact = y[at] * rstd * w;
      double got, slack;
      if (c.out == Output::kFp8) {
        const float scale = rank.scale[c.quant == Quant::kToken ? row : at / kQuantGroup];
        got = e4m3_to_float(static_cast<uint8_t>(rank.out[at])) * static_cast<double>(scale);
        slack = std::fabs(exact) / 14 + 2e-3 * scale + 1e-6;
      } else {
        got = value_at(rank.out, c.dtype, at);
        slack = std::fabs(exact) * (c.dtype == Dtype::kBf16 ? 8e-3 : 1e-3) + 1e-6;
      }
      const bool both_nan = std::isnan(got) && std::isnan(exact);
      if (!both_nan && !(std::fabs(got - exact) <= slack)) complain(index, "norm", at, got, exact);
    }
  }
}

// Let every rank run all calls; `launch(index)` starts its next kernel.
template <class Launch>
void run_all(Launch launch) {
  auto& chance = emulation::chance;
  const auto world = static_cast<uint32_t>(ranks.size());
  const auto count = static_cast<uint32_t>(calls.size());
  uint64_t turns = 0;
  uint32_t favourite = 0;
  while (true) {
    bool left = false;
    for (uint32_t r = 0; r < world; ++r) {
      if (static_cast<int>(r) == missing || ranks[r].call == count) continue;
      left = true;
      if (!ranks[r].running) launch(r);
    }
    if (!left) return;
    if (++turns % 64 == 0) favourite = static_cast<uint32_t>(chance() % (world + 1));
    const uint32_t r = chance() % 4 != 0 && favourite < world
                           ? favourite
                           : static_cast<uint32_t>(chance() % world);
    Rank& rank = ranks[r];
    if (!rank.running) continue;
    emulation::Cta& cta = *rank.ctas[chance() % rank.ctas.size()];
    for (emulation::Warp& warp : cta.warps) {
      if (warp.asleep != 0) {
        --warp.asleep;
      } else if (chance() % 32 == 0) {
        warp.asleep = static_cast<uint32_t>(chance() % 64);
      }
    }
    for (auto& fiber : cta.fibers) {
      if (fiber->ended || cta.warps[fiber->thread / 32].asleep != 0) continue;
      emulation::resume(fiber.get());
      if (!cta.pending.empty() && chance() % 64 == 0)
        emulation::deliver(cta, chance() % cta.pending.size());
    }
    uint32_t alive = 0;
    for (auto& c : rank.ctas) {
      if (c->alive == 0) emulation::deliver_all(*c);
      alive += c->alive;
    }
    if (alive != 0) continue;
    rank.running = false;
    if (missing < 0) {
      verify(r);
      ++rank.call;
      continue;
    }
    const Call& c = calls[rank.call];
    bool nan = false;
    for (uint64_t i = 0; i < static_cast<uint64_t>(c.rows) * c.hidden; ++i) {
      nan = nan ||
            std::isnan(value_at(c.out == Output::kSum ? rank.out : rank.residual_out, c.dtype, i));
    }
    printf("ENDED rank %u %s\n", r, nan ? "with NaN" : "without NaN");
    rank.call = count;
  }
}

// Say who failed and whom it waited for.
inline void tell_failures() {
  for (size_t r = 0; r < ranks.size(); ++r) {
    const FlightRecord& f = ranks[r].flight;
    if (f.valid != 0) {
      printf("FAILED rank %zu: why %u phase %u waits for %u\n", r, f.valid >> 16, f.phase,
             f.source);
    }
  }
}

// Bytes [from, to) of every slab must be clear.
inline void expect_clear(uint64_t from, uint64_t to) {
  for (size_t r = 0; missing < 0 && r < ranks.size(); ++r) {
    for (uint64_t i = from; i < to; ++i) {
      if (ranks[r].slab[i] != static_cast<char>(0xFF) && ++failures <= 5)
        printf("DIRTY rank %zu byte %lu\n", r, i);
    }
  }
}

// Slabs as `Channel::reset` leaves them, with `more` bytes and a margin that must stay untouched.
inline constexpr uint64_t kMargin = 64;
inline void make_slabs(uint64_t more) {
  for (Rank& rank : ranks) {
    rank.slab.assign(layout.slab_bytes + more + kMargin, static_cast<char>(0xFF));
    memset(rank.slab.data(), 0, kControlBytes);
    memset(rank.slab.data() + offsetof(ControlPage, record), 0xFF, sizeof(ControlPage::record));
  }
}

inline int conclude() {
  expect_clear(ranks[0].slab.size() - kMargin, ranks[0].slab.size());
  printf("%s %zu calls, %u wrong\n", failures == 0 ? "RIGHT" : "BAD", calls.size(), failures);
  return failures != 0;
}

}  // namespace rig
