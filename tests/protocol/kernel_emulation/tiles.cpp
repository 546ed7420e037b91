// SPDX-License-Identifier: Apache-2.0
// The kernels that send tiles, csrc/cuda/general.cuh and flat.cuh, on a CPU: calls of both, of any
// schedule, dtype, codec and epilogue, one after another in the same slabs.
//   tiles WORLD ISLANDS CALLS SEED [missing rank]        ISLANDS as in "0,1;2,3", "" for one
#include "cuda/flat.cuh"
#include "cuda/general.cuh"
#include "rig.h"

using namespace rig;

namespace {

constexpr uint64_t kCapacity = 1 << 17;
constexpr uint32_t kFirstEpoch = kEpochWrap - 6;  // a multiple of the slots; the wrap comes soon
constexpr uint32_t kMostUnits = 4;                // tiles of a warp in a flat kernel
std::vector<View> views;
std::vector<bool> is_flat;  // [call]
std::vector<uint32_t> rows_per_cta, group_warps;
bool host_memory = false;  // slabs as mailboxes: odd seeds

template <class T, Output kOut>
void general_body(Rank* rank, uint32_t cta) {
  General<T, kOut> kernel{rank->p, views[rank - ranks.data()],
                          *reinterpret_cast<RowShared*>(rank->shared[cta].data()),
                          reinterpret_cast<float*>(rank->kept[cta].data())};
  kernel.run();
}
using Body = void (*)(Rank*, uint32_t);
template <class T>
Body general_of(Output out) {
  return out == Output::kSum    ? &general_body<T, Output::kSum>
         : out == Output::kNorm ? &general_body<T, Output::kNorm>
                                : &general_body<T, Output::kFp8>;
}

#if WORLD == 2 || WORLD == 4 || WORLD == 8
template <class T, Output kOut, bool kTwoShot, int kUnits>
void flat_body(Rank* rank, uint32_t cta) {
  Flat<T, kOut, kTwoShot, WORLD, kUnits> kernel{
      rank->p, *reinterpret_cast<FlatShared*>(rank->shared[cta].data()),
      reinterpret_cast<uint4*>(rank->kept[cta].data())};
  kernel.run();
}
template <class T, Output kOut, bool kTwoShot>
Body flat_units(uint32_t units) {
  return units == 1   ? &flat_body<T, kOut, kTwoShot, 1>
         : units == 2 ? &flat_body<T, kOut, kTwoShot, 2>
                      : &flat_body<T, kOut, kTwoShot, 4>;
}
template <class T, bool kTwoShot>
Body flat_out(Output out, uint32_t units) {
  return out == Output::kSum    ? flat_units<T, Output::kSum, kTwoShot>(units)
         : out == Output::kNorm ? flat_units<T, Output::kNorm, kTwoShot>(units)
                                : flat_units<T, Output::kFp8, kTwoShot>(units);
}
template <class T>
Body flat_of(Schedule schedule, Output out, uint32_t units) {
#if WORLD > 2
  if (schedule == Schedule::kTwoShot) return flat_out<T, true>(out, units);
#endif
  return flat_out<T, false>(out, units);
}
bool has_flat(const Call& c) {
  return topology.islands == 1 && !c.weight_f32 && c.codec == lossless(c.dtype) &&
         c.dtype != Dtype::kF32 &&
         (c.schedule == Schedule::kOneShot || (WORLD > 2 && c.schedule == Schedule::kTwoShot));
}
#else
bool has_flat(const Call&) { return false; }
#endif

// As Channel::launch does it.
void launch(uint32_t index) {
  Params& p = prepare(index);
  Rank& rank = ranks[index];
  const uint32_t k = rank.call;
  const Call& c = calls[k];
  const uint32_t tiles = p.rows * p.tiles_per_row;
  p.ctas = c.ctas;
  p.tail_fence = host_memory;
  p.scout = host_memory && p.rows * p.hidden > 4096;  // sooner than Channel does
  const Plan plan{topology, c.schedule, c.dtype, c.codec, c.partial, static_cast<uint16_t>(c.ctas)};
  const View view = views[index] = make_view(plan, static_cast<int>(index));
  p.plan_hash = plan_hash(plan);
  const uint32_t stride = wire_stride(c.codec) / 16;
  p.touched_reduce = view.extent(Region::kReduce, tiles) * stride;
  p.touched_cross = view.extent(Region::kCross, tiles) * (wire_stride(c.partial) / 16);
  p.touched_gather = view.extent(Region::kGather, tiles) * stride;
  if (topology.islands == 1 && stride * 16 != wire_stride(Codec::kBf16)) p.touched_cross = 1;
#if WORLD == 2 || WORLD == 4 || WORLD == 8
  if (is_flat[k]) {
    p.group_warps = group_warps[k], p.rows_per_cta = rows_per_cta[k];
    p.units = (p.tiles_per_row + p.group_warps - 1) / p.group_warps;
    p.row_stride = p.ctas * p.rows_per_cta;
    if (c.schedule != Schedule::kOneShot && p.row_stride < p.rows) p.touched_cross = 1;
    const uint32_t threads = p.group_warps * p.rows_per_cta * 32;
    start(rank, threads, sizeof(FlatShared), kMostUnits * threads * 16,
          c.dtype == Dtype::kBf16 ? flat_of<Bf16>(c.schedule, c.out, p.units)
                                  : flat_of<F16>(c.schedule, c.out, p.units));
    return;
  }
#endif
  const uint32_t warps = std::min(kGeneralThreads / 32, p.tiles_per_row);
  start(rank, warps * 32, sizeof(RowShared), p.tiles_per_row * kTile * 4,
        c.dtype == Dtype::kF32    ? general_of<F32>(c.out)
        : c.dtype == Dtype::kBf16 ? general_of<Bf16>(c.out)
                                  : general_of<F16>(c.out));
}

// A random call that fits, and, where there is one, a flat kernel and its geometry.
void add_random() {
  auto& chance = emulation::chance;
  const uint32_t hiddens[] = {8, 256, 264, 1024, 1288, 2816};
  while (true) {
    Call c{};
    c.dtype = static_cast<Dtype>(chance() % 3);
    c.out = static_cast<Output>(chance() % 3);
    c.schedule = static_cast<Schedule>(chance() % kSchedules);
    c.hidden = hiddens[chance() % 6];
    c.quant = c.hidden % kQuantGroup == 0 && chance() % 2 ? Quant::kGroup : Quant::kToken;
    c.rows = 1 + static_cast<uint32_t>(chance() % (c.hidden > 2000 ? 3 : 7));
    c.gemma = chance() % 2, c.weight_f32 = c.dtype != Dtype::kF32 && chance() % 6 == 0;
    c.codec = chance() % 4 == 0 ? Codec::kInt8 : lossless(c.dtype);
    c.partial = chance() % 3 == 0 ? Codec::kF32 : c.codec;
    c.ctas = std::min(c.rows, 1 + static_cast<uint32_t>(chance() % 3));
    const Plan plan{topology, c.schedule, c.dtype, c.codec, c.partial, 0};
    const Shape shape = make_shape(c.rows, c.hidden);
    if (!fits(layout, plan, shape)) continue;
    uint32_t rows = 1, warps = 1;
    const bool flat = has_flat(c) && chance() % 4 != 0;
    if (flat) {
      rows = 1u << chance() % 3;
      const uint32_t least = (shape.tiles_per_row + kMostUnits - 1) / kMostUnits;
      warps = least + static_cast<uint32_t>(chance() % (shape.tiles_per_row - least + 1));
      c.ctas = 1 + static_cast<uint32_t>(chance() % ((c.rows + rows - 1) / rows));
    }
    add(c);
    is_flat.push_back(flat), rows_per_cta.push_back(rows), group_warps.push_back(warps);
    return;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const int world = atoi(argv[1]), count = atoi(argv[3]);
  emulation::chance.seed(static_cast<uint64_t>(atoi(argv[4])));
  host_memory = atoi(argv[4]) % 2 != 0;
  if (argc >= 6) missing = atoi(argv[5]);
  const ParsedIslands parsed = parse_islands(world, argv[2], static_cast<int>(strlen(argv[2])));
  if (parsed.error != IslandsError::kNone) return 2;
  topology = parsed.topology;
  layout = make_layout(topology, kCapacity, kCapacity);
  ranks.resize(world), views.resize(world);
  for (int k = 0; k < count; ++k) add_random();
  make_slabs(0);
  for (Rank& rank : ranks) {
    for (CtaState& s : rank.states) s = CtaState{kFirstEpoch, 0, 0, 0};
  }
  run_all(launch);
  tell_failures();
  // The last call's slot is the next one's to clear.
  const uint32_t last = (kFirstEpoch + count - 1) % kEpochWrap % kSlots;
  for (uint32_t slot = 0; slot < kSlots; ++slot) {
    if (slot != last) expect_clear(layout.slot(slot), layout.slot(slot) + layout.slot_bytes);
  }
  return conclude();
}
