// SPDX-License-Identifier: Apache-2.0
#include "host/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <stdexcept>

#include "host/lanes.h"
#include "host/wait.h"

namespace sm120::host {

// The first page. Every field but `magic` is written before `ready`, or by one rank only.
struct Segment::Header {
  uint64_t magic;
  uint32_t world;
  uint32_t channels;
  uint64_t slab_bytes;
  uint32_t layout_hash;
  std::atomic<uint32_t> ready;
  std::atomic<uint32_t> joined;  // bit per rank
  std::atomic<uint32_t> pid[kMaxWorld];
  std::atomic<uint64_t> pid_namespace[kMaxWorld];
};

namespace {

constexpr uint64_t kMagic = 0x73'6D'31'32'30'68'6F'01;
constexpr uint64_t kHeaderBytes = 4096;
constexpr long kPollNs = 200'000;

void nap() {
  const timespec pause{0, kPollNs};
  nanosleep(&pause, nullptr);
}

[[noreturn]] void fail(const std::string& what) {
  throw std::runtime_error("host communicator: " + what);
}

std::string system_text(const std::string& what) { return what + ": " + strerror(errno); }

uint64_t pid_namespace() {
  struct stat info;
  return stat("/proc/self/ns/pid", &info) == 0 ? info.st_ino : 0;
}

uint32_t hash_layout(const Topology& topology, const Layout& layout) {
  uint32_t h = 2166136261u;
  auto mix = [&h](uint64_t value) {
    for (int i = 0; i < 8; ++i) h = (h ^ ((value >> (8 * i)) & 0xFF)) * 16777619u;
  };
  for (int r = 0; r < topology.world; ++r) mix(topology.island_of[r]);
  mix(layout.capacity);
  mix(layout.small);
  return h;
}

}  // namespace

Segment::Segment(const std::string& session, int rank, int channels, const Topology& topology,
                 const Layout& layout, uint64_t timeout_ms)
    : name_("/sglang-sm120-" + session),
      rank_(rank),
      channels_(channels),
      topology_(topology),
      layout_(layout) {
  bytes_ = kHeaderBytes + static_cast<uint64_t>(topology.world) * channels * layout.slab_bytes;
  for (int& fd : watch_) fd = -1;
  const uint64_t deadline = monotonic_ns() + timeout_ms * 1'000'000;
  try {
    if (rank == 0) {
      create(deadline);
    } else {
      open(deadline);
    }
    join(deadline);
    watch_peers();
  } catch (...) {
    // Only a name this group made is removed: rank 0's own, or one a peer opened and could not
    // complete.
    if (base_ != nullptr) {
      shm_unlink(name_.c_str());
      munmap(base_, bytes_);
    }
    throw;
  }
}

Segment::~Segment() {
  for (int fd : watch_) {
    if (fd >= 0) close(fd);
  }
  if (base_ != nullptr) munmap(base_, bytes_);
}

void Segment::map(int fd) {
  void* base = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (base == MAP_FAILED) fail(system_text("cannot map " + name_));
  base_ = static_cast<uint8_t*>(base);
}

void Segment::create(uint64_t) {
  const int fd = shm_open(name_.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) {
    fail(system_text("cannot create shared memory " + name_ +
                     " (the session text must be unique on this machine)"));
  }
  // Reserving the pages now turns a full /dev/shm into this message instead of a bus error later.
  const int error = posix_fallocate(fd, 0, static_cast<off_t>(bytes_));
  if (error != 0) {
    shm_unlink(name_.c_str());
    close(fd);
    errno = error;
    fail(system_text("cannot reserve " + std::to_string(bytes_ >> 20) +
                     " MiB of shared memory (in a container, give it a larger --shm-size)"));
  }
  try {
    map(fd);
  } catch (...) {
    shm_unlink(name_.c_str());
    close(fd);
    throw;
  }
  close(fd);
  Header* h = header();
  h->magic = kMagic;
  h->world = topology_.world;
  h->channels = static_cast<uint32_t>(channels_);
  h->slab_bytes = layout_.slab_bytes;
  h->layout_hash = hash_layout(topology_, layout_);
  h->ready.store(1, std::memory_order_release);
}

void Segment::open(uint64_t deadline_ns) {
  while (true) {
    const int fd = shm_open(name_.c_str(), O_RDWR | O_CLOEXEC, 0600);
    if (fd >= 0) {
      struct stat info;
      const bool whole =
          fstat(fd, &info) == 0 && static_cast<uint64_t>(info.st_size) >= kHeaderBytes;
      if (whole && static_cast<uint64_t>(info.st_size) != bytes_) {
        close(fd);
        fail("rank 0 made " + std::to_string(info.st_size) + " bytes of shared memory, rank " +
             std::to_string(rank_) + " expects " + std::to_string(bytes_) +
             ": the ranks were given different worlds, islands, channels or capacities");
      }
      if (whole) {
        try {
          map(fd);
        } catch (...) {
          close(fd);
          throw;
        }
        close(fd);
        break;
      }
      close(fd);
    } else if (errno != ENOENT) {
      fail(system_text("cannot open shared memory " + name_));
    }
    if (monotonic_ns() > deadline_ns) {
      fail("rank 0 did not create shared memory " + name_ + " in time (this is rank " +
           std::to_string(rank_) + ")");
    }
    nap();
  }
  while (header()->ready.load(std::memory_order_acquire) == 0) {
    if (monotonic_ns() > deadline_ns) fail("rank 0 did not finish shared memory " + name_);
    nap();
  }
  const Header* h = header();
  if (h->magic != kMagic || h->world != topology_.world ||
      h->channels != static_cast<uint32_t>(channels_) || h->slab_bytes != layout_.slab_bytes ||
      h->layout_hash != hash_layout(topology_, layout_)) {
    fail("rank 0 and rank " + std::to_string(rank_) +
         " were given different worlds, islands, channels or capacities");
  }
}

void Segment::join(uint64_t deadline_ns) {
  Header* h = header();
  for (int c = 0; c < channels_; ++c) {
    uint8_t* own = slab(c, rank_);
    lanes::clear(own + kControlBytes, layout_.slab_bytes - kControlBytes);
    auto* page = new (own) ControlPage{};
    lanes::clear(page->record, sizeof page->record);
  }
  h->pid[rank_].store(static_cast<uint32_t>(getpid()), std::memory_order_relaxed);
  h->pid_namespace[rank_].store(pid_namespace(), std::memory_order_relaxed);
  h->joined.fetch_or(1u << rank_, std::memory_order_acq_rel);
  const uint32_t all = (1u << topology_.world) - 1;
  while (true) {
    const uint32_t joined = h->joined.load(std::memory_order_acquire);
    if (joined == all) break;
    if (monotonic_ns() > deadline_ns) {
      std::string missing;
      for (int r = 0; r < topology_.world; ++r) {
        if ((joined & (1u << r)) == 0) missing += (missing.empty() ? "" : ", ") + std::to_string(r);
      }
      fail("rank(s) " + missing + " of " + std::to_string(topology_.world) +
           " did not join in time (this is rank " + std::to_string(rank_) + ")");
    }
    nap();
  }
  // Everybody has it mapped: the name has served its purpose.
  shm_unlink(name_.c_str());
}

void Segment::watch_peers() {
  const Header* h = header();
  const uint64_t here = pid_namespace();
  for (int r = 0; r < topology_.world; ++r) {
    const auto pid = static_cast<pid_t>(h->pid[r].load(std::memory_order_relaxed));
    if (r == rank_ || pid == getpid() || h->pid_namespace[r].load() != here) continue;
#if defined(SYS_pidfd_open)
    watch_[r] = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
#endif
  }
}

uint8_t* Segment::slab(int channel, int rank) const {
  return base_ + kHeaderBytes +
         (static_cast<uint64_t>(channel) * topology_.world + rank) * layout_.slab_bytes;
}

uint32_t Segment::dead() const {
  pollfd fds[kMaxWorld];
  for (int r = 0; r < topology_.world; ++r) fds[r] = pollfd{watch_[r], POLLIN, 0};
  uint32_t mask = 0;
  if (poll(fds, topology_.world, 0) <= 0) return mask;
  for (int r = 0; r < topology_.world; ++r) {
    if (watch_[r] >= 0 && (fds[r].revents & POLLIN) != 0) mask |= 1u << r;
  }
  return mask;
}

uint32_t Segment::left(int channel) const {
  uint32_t mask = 0;
  for (int r = 0; r < topology_.world; ++r) {
    const auto* page = reinterpret_cast<const ControlPage*>(slab(channel, r));
    if (__atomic_load_n(&page->left, __ATOMIC_ACQUIRE) != 0) mask |= 1u << r;
  }
  return mask;
}

}  // namespace sm120::host
