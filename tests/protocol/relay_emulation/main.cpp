// SPDX-License-Identifier: Apache-2.0
// Runs the relay kernel of csrc/cuda/relay.cuh on a CPU: every rank a stream of kernels, every CUDA
// thread a fiber, in random order, with stores that arrive late. Sums must equal core/sum.h to the
// bit.
//   emulate WORLD CALLS SEED [fences|nofence] [missing rank]
#include <algorithm>

#include "core/sum.h"
#include "cuda/relay.cuh"

using namespace sm120;

namespace {

struct CallCase {
  Dtype dtype;
  Output out;
  Quant quant;
  Schedule schedule;
  uint32_t rows, hidden, ctas;
  bool gemma, weight_f32;
};

struct Rank {
  std::vector<char> slab;
  std::vector<CtaState> states{kMaxCtas};
  std::vector<uint64_t> tickets = std::vector<uint64_t>(kMaxCtas);
  uint32_t claim = 0;
  FlightRecord flight{};
  uint32_t call = 0;  // being run, or calls.size()
  bool running = false;
  Params p{};
  RelayParams r{};
  std::vector<std::unique_ptr<emulation::Cta>> ctas;
  std::vector<char> x, residual, residual_out, out;
  std::vector<float> scale;
  std::vector<std::vector<char>> shared, kept;
};

constexpr uint64_t kCapacity = 1 << 17;
std::vector<CallCase> calls;
std::vector<Rank> ranks;
std::vector<std::vector<std::vector<char>>> inputs;  // [call][rank]
std::vector<std::vector<char>> residuals, weights;
uint32_t failures = 0;
int missing = -1;  // a rank that never calls

uint32_t bits_at(const std::vector<char>& v, Dtype dtype, uint64_t i) {
  return dtype == Dtype::kF32 ? emulation::load<uint32_t>(v.data() + i * 4)
                              : emulation::load<uint16_t>(v.data() + i * 2);
}
float value_at(const std::vector<char>& v, Dtype dtype, uint64_t i) {
  const uint32_t bits = bits_at(v, dtype, i);
  return dtype == Dtype::kF32    ? float_of(bits)
         : dtype == Dtype::kBf16 ? bf16_to_float(static_cast<uint16_t>(bits))
                                 : f16_to_float(static_cast<uint16_t>(bits));
}
float rounded(Dtype dtype, float value) {
  const uint32_t bits = round_to(dtype, value);
  return dtype == Dtype::kF32    ? float_of(bits)
         : dtype == Dtype::kBf16 ? bf16_to_float(static_cast<uint16_t>(bits))
                                 : f16_to_float(static_cast<uint16_t>(bits));
}
std::vector<char> random_tensor(Dtype dtype, uint64_t count, bool specials) {
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

template <class T, Output kOut>
void body(Rank* rank, uint32_t cta) {
  Relay<T, kOut> kernel{rank->p, rank->r, *reinterpret_cast<RelayShared*>(rank->shared[cta].data()),
                        rank->kept[cta].data()};
  kernel.run();
}
template <class T>
void (*body_of(Output out))(Rank*, uint32_t) {
  return out == Output::kSum    ? &body<T, Output::kSum>
         : out == Output::kNorm ? &body<T, Output::kNorm>
                                : &body<T, Output::kFp8>;
}

void enter() {
  emulation::current->body();
  emulation::current->ended = true;
  --emulation::current->cta->alive;
  emulation::yield();
}

void launch(Rank& rank, uint32_t index) {
  const CallCase& c = calls[rank.call];
  const Shape shape = make_shape(c.rows, c.hidden);
  const Layout layout =
      make_layout(flat_topology(static_cast<int>(ranks.size())), kCapacity, kCapacity);
  const RelayLayout relay = make_relay_layout(kCapacity);
  const uint64_t count = static_cast<uint64_t>(c.rows) * c.hidden;
  rank.x = inputs[rank.call][index];
  rank.residual = residuals[rank.call];
  rank.out.assign(count * 4, 0x11);
  rank.residual_out.assign(count * 4, 0x11);
  rank.scale.assign(count, -1.0f);
  Params& p = rank.p;
  p = Params{};
  p.x = rank.x.data(), p.residual = rank.residual.data(), p.weight = weights[rank.call].data();
  p.out = rank.out.data(), p.residual_out = rank.residual_out.data(), p.scale = rank.scale.data();
  p.state = rank.states.data(), p.claim = &rank.claim, p.flight = &rank.flight;
  p.rows = c.rows, p.hidden = c.hidden, p.tiles_per_row = shape.tiles_per_row;
  p.world = static_cast<uint32_t>(ranks.size()), p.rank = index;
  p.ctas = std::min(c.ctas, c.rows);
  p.slot0 = static_cast<uint32_t>(layout.slot(0)),
  p.slot_bytes = static_cast<uint32_t>(layout.slot_bytes);
  p.cross_offset = static_cast<uint32_t>(layout.offset[1]);
  p.gather_offset = static_cast<uint32_t>(layout.offset[2]);
  p.eps = 1e-6f, p.inverse_hidden = 1.0f / static_cast<float>(c.hidden);
  p.op = static_cast<uint8_t>(c.out), p.dtype = static_cast<uint8_t>(c.dtype);
  p.quant = c.out == Output::kFp8 ? c.quant : Quant::kNone;
  p.gemma = c.gemma, p.weight_f32 = c.weight_f32, p.timeout_units = 2'000'000;
  if (missing >= 0) p.timeout_units = 500;
  for (size_t r = 0; r < ranks.size(); ++r) p.peer[r] = ranks[r].slab.data();
  rank.r = RelayParams{static_cast<uint32_t>(layout.slab_bytes),
                       static_cast<uint32_t>(layout.slab_bytes + relay.data_bytes),
                       static_cast<uint32_t>(relay.slot_bytes),
                       make_relay_share(c.schedule, p.world, index, p.tiles_per_row),
                       rank.tickets.data()};
  const uint32_t turns = (p.tiles_per_row + 14) / 15;
  const uint32_t threads = ((p.tiles_per_row + turns - 1) / turns + 1) * 32;
  auto run = c.dtype == Dtype::kF32    ? body_of<F32>(c.out)
             : c.dtype == Dtype::kBf16 ? body_of<Bf16>(c.out)
                                       : body_of<F16>(c.out);
  rank.ctas.clear();
  rank.shared.assign(p.ctas, std::vector<char>(sizeof(RelayShared)));
  rank.kept.assign(p.ctas, std::vector<char>(p.tiles_per_row * kTile * 4));
  for (uint32_t i = 0; i < p.ctas; ++i) {
    auto cta = std::make_unique<emulation::Cta>();
    cta->index = i, cta->threads = cta->alive = threads, cta->grid = p.ctas;
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

void complain(uint32_t index, const char* what, uint64_t at, double got, double expected) {
  const CallCase& c = calls[ranks[index].call];
  if (++failures <= 5) {
    printf("WRONG %s: rank %u call %u (%u x %u, dtype %d, schedule %d) element %lu: %g, not %g\n",
           what, index, ranks[index].call, c.rows, c.hidden, static_cast<int>(c.dtype),
           static_cast<int>(c.schedule), at, got, expected);
  }
}

void verify(uint32_t index) {
  Rank& rank = ranks[index];
  const CallCase& c = calls[rank.call];
  const Topology topology = flat_topology(static_cast<int>(ranks.size()));
  const uint64_t count = static_cast<uint64_t>(c.rows) * c.hidden;
  std::vector<float> y(count);
  for (uint64_t i = 0; i < count; ++i) {
    const float sum = canonical_sum(topology, lossless(c.dtype), [&](uint32_t r) {
      return value_at(inputs[rank.call][r], c.dtype, i);
    });
    if (c.out == Output::kSum) {
      if (bits_at(rank.out, c.dtype, i) != round_to(c.dtype, sum)) {
        complain(index, "sum", i, value_at(rank.out, c.dtype, i), rounded(c.dtype, sum));
      }
      continue;
    }
    const float together = rounded(c.dtype, sum) + value_at(residuals[rank.call], c.dtype, i);
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

}  // namespace

int main(int argc, char** argv) {
  const uint32_t world = static_cast<uint32_t>(atoi(argv[1])),
                 count = static_cast<uint32_t>(atoi(argv[2]));
  emulation::chance.seed(static_cast<uint64_t>(atoi(argv[3])));
  emulation::fences_work = argc < 5 || strcmp(argv[4], "nofence") != 0;
  if (argc >= 6) missing = atoi(argv[5]);
  auto& chance = emulation::chance;
  const uint32_t hiddens[] = {8, 256, 264, 1024, 1288, 2816, 4608};
  for (uint32_t k = 0; k < count; ++k) {
    CallCase c{};
    c.dtype = static_cast<Dtype>(chance() % 3);
    c.out = static_cast<Output>(chance() % 3);
    c.schedule = chance() % 2 ? kRelayTwoShot : kRelayOneShot;
    c.hidden = hiddens[chance() % 7];
    c.quant = c.hidden % kQuantGroup == 0 && chance() % 2 ? Quant::kGroup : Quant::kToken;
    c.rows = 1 + static_cast<uint32_t>(chance() % (c.hidden > 2000 ? 3 : 7));
    c.ctas = 1 + static_cast<uint32_t>(chance() % 3);
    c.gemma = chance() % 2, c.weight_f32 = c.dtype != Dtype::kF32 && chance() % 4 == 0;
    calls.push_back(c);
    const uint64_t elements = static_cast<uint64_t>(c.rows) * c.hidden;
    inputs.emplace_back();
    for (uint32_t r = 0; r < world; ++r)
      inputs[k].push_back(random_tensor(c.dtype, elements, c.out == Output::kSum));
    residuals.push_back(random_tensor(c.dtype, elements, false));
    weights.push_back(random_tensor(c.weight_f32 ? Dtype::kF32 : c.dtype, c.hidden, false));
  }
  const Layout layout = make_layout(flat_topology(static_cast<int>(world)), kCapacity, kCapacity);
  ranks.resize(world);
  for (Rank& rank : ranks) {
    rank.slab.assign(layout.slab_bytes + make_relay_layout(kCapacity).bytes + 64,
                     static_cast<char>(0xFF));
    memset(rank.slab.data(), 0, kControlBytes);
    memset(rank.slab.data() + offsetof(ControlPage, record), 0xFF, sizeof(ControlPage::record));
  }
  // Tiles that a call in tiles has left in the slot before the first: the relay must clear them.
  for (Rank& rank : ranks) {
    for (CtaState& s : rank.states) s = CtaState{1, 5, 0, 3};
    memset(rank.slab.data() + layout.slot(0), 0, 80);
    memset(rank.slab.data() + layout.slot(0) + layout.offset[2], 0, 48);
  }
  uint64_t turns = 0;
  uint32_t favourite = 0;
  while (true) {
    bool left = false;
    for (uint32_t r = 0; r < world; ++r) {
      if (static_cast<int>(r) == missing || ranks[r].call == count) continue;
      left = true;
      if (!ranks[r].running) launch(ranks[r], r);
    }
    if (!left) break;
    if (++turns % 64 == 0) favourite = static_cast<uint32_t>(chance() % (world + 1));
    uint32_t r = chance() % 4 != 0 && favourite < world ? favourite
                                                        : static_cast<uint32_t>(chance() % world);
    Rank& rank = ranks[r];
    if (!rank.running) continue;
    emulation::Cta& cta = *rank.ctas[chance() % rank.ctas.size()];
    for (auto& fiber : cta.fibers) {
      if (fiber->ended) continue;
      emulation::current = fiber.get();
      swapcontext(&emulation::scheduler, &fiber->context);
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
    } else {
      const CallCase& c = calls[rank.call];
      bool nan = false;
      for (uint64_t i = 0; i < static_cast<uint64_t>(c.rows) * c.hidden; ++i) {
        nan = nan || std::isnan(value_at(c.out == Output::kSum ? rank.out : rank.residual_out,
                                         c.dtype, i));
      }
      printf("ENDED rank %u %s\n", r, nan ? "with NaN" : "without NaN");
      rank.call = count;
    }
  }
  for (uint32_t r = 0; r < world; ++r) {
    const FlightRecord& f = ranks[r].flight;
    if (f.valid != 0) {
      printf("FAILED rank %u: why %u phase %u waits for %u\n", r, f.valid >> 16, f.phase, f.source);
    }
    for (uint64_t i = layout.slot(0); missing < 0 && i < layout.slab_bytes; ++i) {
      if (ranks[r].slab[i] != static_cast<char>(0xFF) && ++failures <= 5)
        printf("DIRTY rank %u byte %lu\n", r, i);
    }
    for (uint64_t i = ranks[r].slab.size() - 64; i < ranks[r].slab.size(); ++i) {
      if (ranks[r].slab[i] != static_cast<char>(0xFF)) ++failures;
    }
  }
  printf("%s %u calls, %u wrong\n", failures == 0 ? "RIGHT" : "BAD", count, failures);
  return failures != 0;
}
