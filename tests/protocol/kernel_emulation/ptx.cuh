// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/cuda/ptx.cuh where the kernels run on a CPU: every CUDA thread is a
// fiber, and stores to slabs wait in their CTA's buffer until a fence, the kernel's end or chance
// delivers them, in any order but for the same address.
#pragma once

#include <cuda_runtime.h>
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <vector>

#define SM120_HAS_CLUSTER 0
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__

namespace emulation {

struct Store {
  char* to;
  uint32_t bytes;
  char data[16];
};

struct Barrier {
  uint32_t arrived = 0, generation = 0;
};

struct Warp {
  uint32_t asleep = 0;  // turns that it lets pass, so that the others run ahead
  uint32_t arrived = 0, generation = 0;
  uint32_t values[2][32] = {};
};

struct Fiber;
struct Cta {
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Warp> warps;
  Barrier barriers[16];
  std::vector<Store> pending;
  uint32_t index = 0, threads = 0, grid = 0, alive = 0;
};

struct Fiber {
  ucontext_t context{};  // of its first step; later ones jump, which costs no system call
  jmp_buf at;
  bool started = false;
  std::unique_ptr<char[]> stack;
  std::function<void()> body;
  Cta* cta = nullptr;
  uint32_t thread = 0;
  bool ended = false;
};

inline Fiber* current = nullptr;
inline jmp_buf scheduler;
inline std::mt19937_64 chance;
inline uint64_t clock_ns = 0;
inline bool fences_work = true;  // a negative control turns them off

// Not inlined: their callers must not see setjmp return twice.
__attribute__((noinline)) inline void yield() {
  if (_setjmp(current->at) == 0) _longjmp(scheduler, 1);
}
__attribute__((noinline)) inline void resume(Fiber* fiber) {
  current = fiber;
  if (_setjmp(scheduler) != 0) return;
  if (fiber->started) _longjmp(fiber->at, 1);
  fiber->started = true;
  setcontext(&fiber->context);
}

inline void deliver(Cta& cta, size_t index) {
  for (size_t i = 0; i < index; ++i) {
    if (cta.pending[i].to == cta.pending[index].to) return deliver(cta, i);
  }
  memcpy(cta.pending[index].to, cta.pending[index].data, cta.pending[index].bytes);
  cta.pending.erase(cta.pending.begin() + static_cast<std::ptrdiff_t>(index));
}
inline void deliver_all(Cta& cta) {
  for (const Store& s : cta.pending) memcpy(s.to, s.data, s.bytes);
  cta.pending.clear();
}
inline void store(void* to, const void* data, uint32_t bytes) {
  Store s{static_cast<char*>(to), bytes, {}};
  memcpy(s.data, data, bytes);
  current->cta->pending.push_back(s);
}
template <class T>
T load(const void* from) {
  T v;
  memcpy(&v, from, sizeof v);
  return v;
}

inline void meet(Barrier& barrier, uint32_t expected) {
  const uint32_t generation = barrier.generation;
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  while (barrier.generation == generation) yield();
}

// Counts as one that has come, without waiting.
inline void come(Barrier& barrier, uint32_t expected) {
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
}

// Every lane's value, once all 32 have come.
inline const uint32_t* exchange(uint32_t value) {
  Warp& warp = current->cta->warps[current->thread / 32];
  const uint32_t generation = warp.generation;
  uint32_t* values = warp.values[generation % 2];
  values[current->thread % 32] = value;
  if (++warp.arrived == 32) {
    warp.arrived = 0;
    ++warp.generation;
  } else {
    while (warp.generation == generation) yield();
  }
  return values;
}

struct Index {
  uint32_t x;
};

}  // namespace emulation

#define threadIdx (emulation::Index{emulation::current->thread})
#define blockIdx (emulation::Index{emulation::current->cta->index})
#define blockDim (emulation::Index{emulation::current->cta->threads})
#define gridDim (emulation::Index{emulation::current->cta->grid})

inline float __uint_as_float(uint32_t v) { return emulation::load<float>(&v); }
inline uint32_t __float_as_uint(float v) { return emulation::load<uint32_t>(&v); }
inline float rsqrtf(float v) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(v))); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline int __clz(uint32_t v) { return v == 0 ? 32 : __builtin_clz(v); }
inline int __ffs(uint32_t v) { return __builtin_ffs(static_cast<int>(v)); }
inline void __syncthreads() {
  emulation::meet(emulation::current->cta->barriers[0], emulation::current->cta->threads);
}
inline uint32_t __shfl_sync(uint32_t, uint32_t value, uint32_t lane) {
  return emulation::exchange(value)[lane % 32];
}
inline float __shfl_xor_sync(uint32_t, float value, int mask) {
  const uint32_t lane = emulation::current->thread % 32;
  return __uint_as_float(
      emulation::exchange(__float_as_uint(value))[lane ^ static_cast<uint32_t>(mask)]);
}
inline uint32_t __shfl_xor_sync(uint32_t, uint32_t value, int mask) {
  const uint32_t lane = emulation::current->thread % 32;
  return emulation::exchange(value)[lane ^ static_cast<uint32_t>(mask)];
}
inline uint32_t __ballot_sync(uint32_t, bool value) {
  const uint32_t* values = emulation::exchange(value);
  uint32_t all = 0;
  for (uint32_t i = 0; i < 32; ++i) all |= values[i] << i;
  return all;
}
inline bool __any_sync(uint32_t mask, bool value) { return __ballot_sync(mask, value) != 0; }
inline uint32_t __reduce_max_sync(uint32_t, uint32_t value) {
  const uint32_t* values = emulation::exchange(value);
  uint32_t most = 0;
  for (uint32_t i = 0; i < 32; ++i) most = values[i] > most ? values[i] : most;
  return most;
}
inline uint32_t atomicExch(uint32_t* at, uint32_t value) {
  const uint32_t before = *at;
  *at = value;
  return before;
}
using std::max;
using std::min;

namespace sm120::ptx {

inline uint4 ld_wire(const void* p) {
  if (emulation::chance() % 4 == 0) emulation::yield();
  return emulation::load<uint4>(p);
}
inline void st_wire(void* p, uint4 v) { emulation::store(p, &v, sizeof v); }
inline void st_wire8(void* p, uint2 v) { emulation::store(p, &v, sizeof v); }
inline uint32_t ld_wire4(const void* p) {
  emulation::yield();
  return emulation::load<uint32_t>(p);
}
inline void st_wire4(void* p, uint32_t v) { emulation::store(p, &v, sizeof v); }
inline uint64_t ld_flag(const void* p) {
  emulation::yield();
  return emulation::load<uint64_t>(p);
}
inline uint64_t ld_acquire_flag(const void* p) { return ld_flag(p); }
inline void st_flag(void* p, uint64_t v) { emulation::store(p, &v, sizeof v); }
inline void fence_sys() {
  if (emulation::fences_work) emulation::deliver_all(*emulation::current->cta);
}
inline uint4 ld_stream(const void* p) { return emulation::load<uint4>(p); }
inline uint4 ld_weight(const void* p) { return emulation::load<uint4>(p); }
inline float reciprocal(float v) { return 1.0f / v; }
inline uint64_t globaltimer() { return emulation::clock_ns += 1024; }
inline void launch_dependents() {}
inline void wait_previous() {}
inline void wait_previous(const char*&, const char*&, uint32_t&) {}
inline void bar_group(uint32_t id, uint32_t threads) {
  emulation::meet(emulation::current->cta->barriers[id], threads);
}
inline void bar_arrive(uint32_t id, uint32_t threads) {
  emulation::come(emulation::current->cta->barriers[id], threads);
}
inline void prefetch_line(const void*) {}

}  // namespace sm120::ptx
