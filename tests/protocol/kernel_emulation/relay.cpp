// SPDX-License-Identifier: Apache-2.0
// The relay kernel of csrc/cuda/relay.cuh on a CPU.
//   relay WORLD CALLS SEED [fences|nofence] [missing rank]
#include "cuda/relay.cuh"

#include "rig.h"

using namespace rig;

namespace {

constexpr uint64_t kCapacity = 1 << 17;
std::vector<RelayParams> given;
std::vector<std::vector<uint64_t>> tickets;

template <class T, Output kOut>
void body(Rank* rank, uint32_t cta) {
  Relay<T, kOut> kernel{rank->p, given[rank - ranks.data()],
                        *reinterpret_cast<RelayShared*>(rank->shared[cta].data()),
                        rank->kept[cta].data()};
  kernel.run();
}
template <class T>
void (*body_of(Output out))(Rank*, uint32_t) {
  return out == Output::kSum    ? &body<T, Output::kSum>
         : out == Output::kNorm ? &body<T, Output::kNorm>
                                : &body<T, Output::kFp8>;
}

void launch(uint32_t index) {
  Params& p = prepare(index);
  Rank& rank = ranks[index];
  const Call& c = calls[rank.call];
  const RelayLayout relay = make_relay_layout(kCapacity);
  p.ctas = std::min(c.ctas, c.rows);
  given[index] = RelayParams{static_cast<uint32_t>(layout.slab_bytes),
                             static_cast<uint32_t>(layout.slab_bytes + relay.data_bytes),
                             static_cast<uint32_t>(relay.slot_bytes),
                             make_relay_share(c.schedule, p.world, index, p.tiles_per_row),
                             tickets[index].data()};
  const uint32_t turns = (p.tiles_per_row + 14) / 15;
  const uint32_t threads = ((p.tiles_per_row + turns - 1) / turns + 1) * 32;
  start(rank, threads, sizeof(RelayShared), p.tiles_per_row * kTile * 4,
        c.dtype == Dtype::kF32    ? body_of<F32>(c.out)
        : c.dtype == Dtype::kBf16 ? body_of<Bf16>(c.out)
                                  : body_of<F16>(c.out));
}

}  // namespace

int main(int argc, char** argv) {
  const int world = atoi(argv[1]), count = atoi(argv[2]);
  auto& chance = emulation::chance;
  chance.seed(static_cast<uint64_t>(atoi(argv[3])));
  emulation::fences_work = argc < 5 || strcmp(argv[4], "nofence") != 0;
  if (argc >= 6) missing = atoi(argv[5]);
  topology = flat_topology(world);
  layout = make_layout(topology, kCapacity, kCapacity);
  ranks.resize(world), given.resize(world);
  tickets.assign(world, std::vector<uint64_t>(kMaxCtas));
  const uint32_t hiddens[] = {8, 256, 264, 1024, 1288, 2816, 4608};
  for (int k = 0; k < count; ++k) {
    Call c{};
    c.dtype = static_cast<Dtype>(chance() % 3);
    c.out = static_cast<Output>(chance() % 3);
    c.schedule = chance() % 2 ? kRelayTwoShot : kRelayOneShot;
    c.hidden = hiddens[chance() % 7];
    c.quant = c.hidden % kQuantGroup == 0 && chance() % 2 ? Quant::kGroup : Quant::kToken;
    c.rows = 1 + static_cast<uint32_t>(chance() % (c.hidden > 2000 ? 3 : 7));
    c.ctas = 1 + static_cast<uint32_t>(chance() % 3);
    c.gemma = chance() % 2, c.weight_f32 = c.dtype != Dtype::kF32 && chance() % 4 == 0;
    c.codec = c.partial = lossless(c.dtype);
    add(c);
  }
  make_slabs(make_relay_layout(kCapacity).bytes);
  // Tiles that a call in tiles has left in the slot before the first: the relay must clear them.
  for (Rank& rank : ranks) {
    for (CtaState& s : rank.states) s = CtaState{1, 5, 0, 3};
    memset(rank.slab.data() + layout.slot(0), 0, 80);
    memset(rank.slab.data() + layout.slot(0) + layout.offset[2], 0, 48);
  }
  run_all(launch);
  tell_failures();
  expect_clear(layout.slot(0), layout.slab_bytes);
  return conclude();
}
