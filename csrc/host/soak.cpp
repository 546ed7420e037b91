// SPDX-License-Identifier: Apache-2.0
#include "host/soak.h"

#include <cstring>
#include <stdexcept>

namespace sm120::host {
namespace {

constexpr uint64_t kBatch = 64;

struct Call {
  WorldCall spec;
  std::vector<uint8_t> x;
  std::vector<uint8_t> out;
};

// Mostly ordinary numbers, some raw bit patterns: infinities, subnormals, NaNs with any payload.
uint32_t random_lane(std::mt19937_64& random, Dtype dtype) {
  const uint64_t r = random();
  if (r % 8 == 0) return static_cast<uint32_t>(r >> 32);
  const float value = static_cast<float>(static_cast<int64_t>(r >> 24)) * 0x1p-36f - 8.0f;
  return round_to(dtype, value);
}

Call random_call(const SoakConfig& config, std::mt19937_64& random) {
  const Topology& topology = config.world.topology;
  Call call;
  Plan& plan = call.spec.plan;
  plan.topology = topology;
  plan.dtype = static_cast<Dtype>(random() % 3);
  plan.codec = lossless(plan.dtype);
  plan.partial = random() % 2 == 0 ? plan.codec : Codec::kF32;
  plan.schedule = static_cast<Schedule>(random() % kSchedules);
  plan.ctas = static_cast<uint16_t>(1 + random() % 3);
  const uint32_t rows = 1 + static_cast<uint32_t>(random() % config.most_rows);
  call.spec.hidden = 8 * (1 + static_cast<uint32_t>(random() % (config.most_hidden / 8)));
  call.spec.rows.assign(topology.world, rows);
  call.spec.stride_rows = rows;
  const size_t elements = static_cast<size_t>(topology.world) * rows * call.spec.hidden;
  const uint32_t width = dtype_bytes(plan.dtype);
  call.x.resize(elements * width);
  call.out.assign(elements * width, 0xA5);
  for (size_t i = 0; i < elements; ++i) {
    const uint32_t lane = random_lane(random, plan.dtype);
    memcpy(call.x.data() + i * width, &lane, width);
  }
  return call;
}

float load(Dtype dtype, const uint8_t* lane) {
  if (dtype == Dtype::kF32) {
    uint32_t bits;
    memcpy(&bits, lane, 4);
    return float_of(bits);
  }
  uint16_t bits;
  memcpy(&bits, lane, 2);
  return dtype == Dtype::kBf16 ? bf16_to_float(bits) : f16_to_float(bits);
}

// Index of the first wrong element of a call, or -1.
int64_t first_wrong(const Call& call) {
  const Plan& plan = call.spec.plan;
  const uint32_t width = dtype_bytes(plan.dtype);
  const size_t part = static_cast<size_t>(call.spec.rows[0]) * call.spec.hidden;
  for (size_t i = 0; i < part; ++i) {
    const float sum = canonical_sum(plan.topology, plan.partial, [&](uint32_t position) {
      const size_t rank = plan.topology.member[position];
      return load(plan.dtype, call.x.data() + (rank * part + i) * width);
    });
    const uint32_t expected = round_to(plan.dtype, sum);
    for (size_t r = 0; r < plan.topology.world; ++r) {
      const size_t at = r * part + i;
      if (memcmp(call.out.data() + at * width, &expected, width) != 0) {
        return static_cast<int64_t>(at);
      }
    }
  }
  return -1;
}

}  // namespace

uint64_t soak(const SoakConfig& config) {
  World world(config.world);
  std::mt19937_64 random(config.seed);
  uint64_t checked = 0;
  while (checked < config.calls) {
    std::vector<Call> batch;
    for (uint64_t i = 0; i < kBatch; ++i) batch.push_back(random_call(config, random));
    std::vector<WorldCall> specs;
    for (Call& call : batch) {
      call.spec.x = call.x.data();
      call.spec.out = call.out.data();
      specs.push_back(call.spec);
    }
    const std::vector<std::string> failures =
        config.threads ? world.run_threads(specs) : world.run_stepped(specs);
    const std::string where = "seed " + std::to_string(config.seed) + ", calls " +
                              std::to_string(checked) + ".." + std::to_string(checked + kBatch - 1);
    for (const std::string& failure : failures) {
      if (!failure.empty()) throw std::runtime_error(where + ": " + failure);
    }
    for (uint64_t i = 0; i < kBatch; ++i) {
      const int64_t wrong = first_wrong(batch[i]);
      if (wrong >= 0) {
        throw std::runtime_error(where + ": wrong bits in call " + std::to_string(checked + i) +
                                 ", element " + std::to_string(wrong) + ", schedule " +
                                 std::to_string(static_cast<int>(batch[i].spec.plan.schedule)));
      }
    }
    checked += kBatch;
  }
  return checked;
}

}  // namespace sm120::host
