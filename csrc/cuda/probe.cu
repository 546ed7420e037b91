// SPDX-License-Identifier: Apache-2.0
#include <map>
#include <memory>
#include <stdexcept>

#include "channel.h"
#include "probe.h"
#include "ptx.cuh"

namespace sm120 {
namespace {

constexpr int kThreads = 256;
constexpr int kCtasPerFlow = 4;  // one already fills a Gen5 x16 link to nine tenths
constexpr uint64_t kMix = 0x9E3779B97F4A7C15ull;
constexpr uint32_t kSpinsPerLook = 64;

struct Words {
  uint64_t address[kProbeParts];
  uint64_t edge[kProbeParts];
  uint32_t count;
};

// What a kernel tells the host; in mapped pinned memory.
struct Answer {
  uint32_t failed;
  uint32_t unused;
  unsigned long long began;
  unsigned long long ended[kProbePeers];
};

__device__ uint64_t pattern_word(uint64_t index, uint64_t edge) {
  const uint64_t m = (index + 1) * kMix;
  return (m ^ (m >> 29)) ^ edge;
}

__device__ uint2 halves(uint64_t w) {
  return make_uint2(static_cast<uint32_t>(w), static_cast<uint32_t>(w >> 32));
}

__device__ bool late(uint64_t deadline) { return ptx::globaltimer() > deadline; }

// Poll one 4-byte word for `value`; false after the bound.
__device__ bool wait_word(uint64_t address, uint32_t value, uint64_t deadline) {
  for (uint32_t spins = 1;; ++spins) {
    if (ptx::ld_wire4(reinterpret_cast<const void*>(address)) == value) return true;
    if (spins % kSpinsPerLook == 0 && late(deadline)) return false;
  }
}

__global__ void __launch_bounds__(kThreads) push_kernel(Words to, uint64_t bytes) {
  const uint32_t flow = blockIdx.y;
  char* const base = reinterpret_cast<char*>(to.address[flow]);
  const uint64_t pairs = bytes / 16;
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * kThreads;
  const uint64_t first = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x;
  for (uint64_t i = first; i < pairs; i += step) {
    const uint2 a = halves(pattern_word(2 * i, to.edge[flow]));
    const uint2 b = halves(pattern_word(2 * i + 1, to.edge[flow]));
    ptx::st_wire(base + 16 * i, make_uint4(a.x, a.y, b.x, b.y));
  }
  if (first == 0 && bytes % 16 != 0) {
    ptx::st_wire8(base + 16 * pairs, halves(pattern_word(2 * pairs, to.edge[flow])));
  }
}

__global__ void __launch_bounds__(kThreads)
    arrived_kernel(uint64_t address, uint64_t bytes, uint64_t timeout_ns, Answer* answer) {
  const char* const base = reinterpret_cast<const char*>(address);
  const uint64_t deadline = ptx::globaltimer() + timeout_ns;
  const uint64_t words = bytes / 8;
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * kThreads;
  for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x; i < words;
       i += step) {
    for (uint32_t spins = 1;; ++spins) {
      const uint2 v = ptx::ld_wire8(base + 8 * i);
      if ((v.x | v.y) != 0) break;
      if (spins % kSpinsPerLook == 0 && late(deadline)) {
        answer->failed = 1;
        return;
      }
    }
  }
}

__global__ void ping_kernel(uint64_t there, uint64_t back, uint32_t base, uint32_t rounds,
                            uint64_t timeout_ns, Answer* answer) {
  const uint64_t deadline = ptx::globaltimer() + timeout_ns;
  for (uint32_t i = 1; i <= rounds; ++i) {
    ptx::st_wire4(reinterpret_cast<void*>(there), base + i);
    if (!wait_word(back, base + i, deadline)) {
      answer->failed = 1;
      return;
    }
    if (i == 1) answer->began = ptx::globaltimer();
  }
  answer->ended[0] = ptx::globaltimer();
}

__global__ void echo_kernel(uint64_t here, uint64_t back, uint32_t base, uint32_t rounds,
                            uint64_t timeout_ns, Answer* answer) {
  const uint64_t deadline = ptx::globaltimer() + timeout_ns;
  for (uint32_t i = 1; i <= rounds; ++i) {
    if (!wait_word(here, base + i, deadline)) {
      answer->failed = 1;
      return;
    }
    ptx::st_wire4(reinterpret_cast<void*>(back), base + i);
  }
}

// One row of CTAs per flow. CTA 0 tells the others that this rank is there; all wait for everyone.
__global__ void __launch_bounds__(kThreads)
    stream_kernel(Words to, uint64_t bytes, Words tell, Words hear, uint32_t mark,
                  uint64_t timeout_ns, Answer* answer, unsigned long long* local) {
  __shared__ bool go;
  const uint32_t flow = blockIdx.y;
  if (threadIdx.x == 0) {
    const uint64_t deadline = ptx::globaltimer() + timeout_ns;
    if (blockIdx.x == 0 && flow == 0) {
      for (uint32_t i = 0; i < tell.count; ++i)
        ptx::st_wire4(reinterpret_cast<void*>(tell.address[i]), mark);
    }
    go = true;
    for (uint32_t i = 0; i < hear.count; ++i) go = go && wait_word(hear.address[i], mark, deadline);
    if (!go) answer->failed = 1;
    // The earliest start and the latest end of a flow's CTAs, in device memory: atomics stay local.
    if (go) atomicMin(&local[0], ptx::globaltimer());
  }
  __syncthreads();
  if (!go) return;
  char* const base = reinterpret_cast<char*>(to.address[flow]);
  const uint64_t pairs = bytes / 16;
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * kThreads;
  const uint4 value = make_uint4(mark, mark, mark, mark);
  for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x; i < pairs;
       i += step) {
    ptx::st_wire(base + 16 * i, value);
  }
  ptx::fence_sys();  // the stores are performed, not only issued
  __syncthreads();
  if (threadIdx.x == 0) atomicMax(&local[1 + flow], ptx::globaltimer());
}

__global__ void __launch_bounds__(kThreads)
    fetch_kernel(uint64_t source, uint64_t bytes, unsigned long long* local) {
  if (threadIdx.x == 0) atomicMin(&local[0], ptx::globaltimer());
  __syncthreads();
  const char* const base = reinterpret_cast<const char*>(source);
  const uint64_t pairs = bytes / 16;
  const uint64_t step = static_cast<uint64_t>(gridDim.x) * kThreads;
  uint32_t seen = 0;
  for (uint64_t i = static_cast<uint64_t>(blockIdx.x) * kThreads + threadIdx.x; i < pairs;
       i += step) {
    const uint4 v = ptx::ld_wire(base + 16 * i);
    seen ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  __syncthreads();
  if (threadIdx.x == 0) atomicMax(&local[1], ptx::globaltimer());
  // Never true for every thread: keeps the loads.
  if (seen == 0x9E3779B9u && bytes == 1) local[1] = 0;
}

// A stream and the memory for answers, made once per thread and device: allocating while another
// rank's kernel of this process spins could wait for that kernel.
class Session {
 public:
  explicit Session(int device) {
    check(cudaSetDevice(device), "probe: cudaSetDevice");
    check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "probe: stream");
    check(cudaHostAlloc(reinterpret_cast<void**>(&answer_), sizeof(Answer), cudaHostAllocMapped),
          "probe: answer");
    void* mapped = nullptr;
    check(cudaHostGetDevicePointer(&mapped, answer_, 0), "probe: answer");
    device_answer_ = static_cast<Answer*>(mapped);
    check(cudaMalloc(reinterpret_cast<void**>(&clocks_), kClocks * sizeof *clocks_),
          "probe: clocks");
    load();
  }
  ~Session() {
    cudaStreamDestroy(stream_);
    cudaFreeHost(answer_);
    cudaFree(clocks_);
  }
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  // This thread's session on `device`, ready for the next call.
  static Session& of(int device) {
    static thread_local std::map<int, std::unique_ptr<Session>> sessions;
    std::unique_ptr<Session>& mine = sessions[device];
    if (!mine) mine = std::make_unique<Session>(device);
    check(cudaSetDevice(device), "probe: cudaSetDevice");
    *mine->answer_ = Answer{};
    return *mine;
  }

  cudaStream_t stream() const { return stream_; }
  Answer* answer() const { return device_answer_; }
  // Clocks in device memory: [0] starts at its maximum, the others at zero.
  unsigned long long* clocks() {
    check(cudaMemsetAsync(clocks_, 0xFF, sizeof *clocks_, stream_), "probe: clocks");
    check(cudaMemsetAsync(clocks_ + 1, 0, (kClocks - 1) * sizeof *clocks_, stream_),
          "probe: clocks");
    return clocks_;
  }
  const Answer& finish(const char* what) {
    check(cudaGetLastError(), what);
    check(cudaStreamSynchronize(stream_), what);
    return *answer_;
  }
  // Nanoseconds from the common start to the end of a flow.
  int64_t since_start(int flow) {
    unsigned long long read[kClocks];
    check(cudaMemcpyAsync(read, clocks_, sizeof read, cudaMemcpyDeviceToHost, stream_),
          "probe: clocks");
    check(cudaStreamSynchronize(stream_), "probe: clocks");
    return static_cast<int64_t>(read[1 + flow] - read[0]);
  }

 private:
  // Lazy loading of a kernel could wait for kernels that spin.
  static void load() {
    cudaFuncAttributes unused;
    check(cudaFuncGetAttributes(&unused, push_kernel), "probe: load");
    check(cudaFuncGetAttributes(&unused, arrived_kernel), "probe: load");
    check(cudaFuncGetAttributes(&unused, ping_kernel), "probe: load");
    check(cudaFuncGetAttributes(&unused, echo_kernel), "probe: load");
    check(cudaFuncGetAttributes(&unused, stream_kernel), "probe: load");
    check(cudaFuncGetAttributes(&unused, fetch_kernel), "probe: load");
  }

  static constexpr int kClocks = 1 + kProbePeers;
  cudaStream_t stream_ = nullptr;
  Answer* answer_ = nullptr;
  Answer* device_answer_ = nullptr;
  unsigned long long* clocks_ = nullptr;
};

Words words_of(const std::vector<uint64_t>& addresses, const std::vector<uint64_t>& edges = {}) {
  if (addresses.size() > kProbeParts) throw std::runtime_error("probe: too many addresses");
  Words w{};
  w.count = static_cast<uint32_t>(addresses.size());
  for (size_t i = 0; i < addresses.size(); ++i) {
    w.address[i] = addresses[i];
    w.edge[i] = i < edges.size() ? edges[i] : 0;
  }
  return w;
}

}  // namespace

void probe_clear(int device, uint64_t address, uint64_t bytes) {
  Session& s = Session::of(device);
  check(cudaMemsetAsync(reinterpret_cast<void*>(address), 0, bytes, s.stream()), "probe: clear");
  s.finish("probe: clear");
}

void probe_push(int device, const std::vector<uint64_t>& targets,
                const std::vector<uint64_t>& edges, uint64_t bytes) {
  Session& s = Session::of(device);
  const dim3 grid(kCtasPerFlow, static_cast<unsigned>(targets.size()));
  push_kernel<<<grid, kThreads, 0, s.stream()>>>(words_of(targets, edges), bytes);
  s.finish("probe: push");
}

bool probe_arrived(int device, uint64_t address, uint64_t bytes, uint64_t timeout_ns) {
  Session& s = Session::of(device);
  arrived_kernel<<<8, kThreads, 0, s.stream()>>>(address, bytes, timeout_ns, s.answer());
  return s.finish("probe: arrival").failed == 0;
}

std::string probe_read(int device, uint64_t address, uint64_t bytes) {
  Session& s = Session::of(device);
  std::string out(bytes, '\0');
  check(cudaMemcpyAsync(out.data(), reinterpret_cast<const void*>(address), bytes,
                        cudaMemcpyDeviceToHost, s.stream()),
        "probe: read");
  s.finish("probe: read");
  return out;
}

int64_t probe_ping(int device, uint64_t there, uint64_t back, uint32_t base, uint32_t rounds,
                   uint64_t timeout_ns) {
  Session& s = Session::of(device);
  ping_kernel<<<1, 1, 0, s.stream()>>>(there, back, base, rounds, timeout_ns, s.answer());
  const Answer& a = s.finish("probe: ping");
  return a.failed != 0 ? -1 : static_cast<int64_t>(a.ended[0] - a.began);
}

bool probe_echo(int device, uint64_t here, uint64_t back, uint32_t base, uint32_t rounds,
                uint64_t timeout_ns) {
  Session& s = Session::of(device);
  echo_kernel<<<1, 1, 0, s.stream()>>>(here, back, base, rounds, timeout_ns, s.answer());
  return s.finish("probe: echo").failed == 0;
}

std::vector<int64_t> probe_stream(int device, const std::vector<uint64_t>& targets, uint64_t bytes,
                                  const std::vector<uint64_t>& tell,
                                  const std::vector<uint64_t>& hear, uint32_t mark,
                                  uint64_t timeout_ns) {
  if (targets.size() > kProbePeers) throw std::runtime_error("probe: too many flows");
  Session& s = Session::of(device);
  const dim3 grid(kCtasPerFlow, static_cast<unsigned>(targets.size()));
  stream_kernel<<<grid, kThreads, 0, s.stream()>>>(words_of(targets), bytes, words_of(tell),
                                                   words_of(hear), mark, timeout_ns, s.answer(),
                                                   s.clocks());
  const bool failed = s.finish("probe: stream").failed != 0;
  std::vector<int64_t> out;
  for (size_t i = 0; i < targets.size(); ++i) {
    out.push_back(failed ? -1 : s.since_start(static_cast<int>(i)));
  }
  return out;
}

int64_t probe_fetch(int device, uint64_t source, uint64_t bytes) {
  Session& s = Session::of(device);
  fetch_kernel<<<16, kThreads, 0, s.stream()>>>(source, bytes, s.clocks());
  s.finish("probe: fetch");
  return s.since_start(0);
}

}  // namespace sm120
