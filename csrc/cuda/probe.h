// SPDX-License-Identifier: Apache-2.0
// The probe's kernels: the same stores and loads as the collectives, alone, timed and bounded.
// Every function returns within its bound; the caller names the edge.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sm120 {

inline constexpr int kProbePeers = 8;  // flows one call may start: CUDA maps no more peers
inline constexpr int kProbeParts = 16;

// Zero `bytes` at `address` and wait until that is done.
void probe_clear(int device, uint64_t address, uint64_t bytes);

// Store the pattern of fabric/driver.py to every target at once: word i is
// (m = (i + 1) * mix, m ^ m >> 29) ^ edge. `bytes` is a multiple of 8.
void probe_push(int device, const std::vector<uint64_t>& targets,
                const std::vector<uint64_t>& edges, uint64_t bytes);

// Wait until every 8 bytes at `address` differ from zero; false when the bound is over.
bool probe_arrived(int device, uint64_t address, uint64_t bytes, uint64_t timeout_ns);

std::string probe_read(int device, uint64_t address, uint64_t bytes);

// `rounds` round trips: store base + 1, base + 2, ... to `there`, wait for each at `back`. Total
// nanoseconds of all but the first (which waits for the other rank's kernel); -1 after the bound.
int64_t probe_ping(int device, uint64_t there, uint64_t back, uint32_t base, uint32_t rounds,
                   uint64_t timeout_ns);
bool probe_echo(int device, uint64_t here, uint64_t back, uint32_t base, uint32_t rounds,
                uint64_t timeout_ns);

// Start together with the other ranks of a pattern: store `mark` to every word of `tell`, wait for
// it in every word of `hear`; then store `bytes` to every target at once. Nanoseconds per target,
// from the common start until its stores are performed; -1 after the bound.
std::vector<int64_t> probe_stream(int device, const std::vector<uint64_t>& targets, uint64_t bytes,
                                  const std::vector<uint64_t>& tell,
                                  const std::vector<uint64_t>& hear, uint32_t mark,
                                  uint64_t timeout_ns);

// Load `bytes` from `source`; nanoseconds.
int64_t probe_fetch(int device, uint64_t source, uint64_t bytes);

}  // namespace sm120
