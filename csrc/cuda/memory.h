// SPDX-License-Identifier: Apache-2.0
// Where slabs live and how another process maps them. Each way fails with a text; the caller tries
// the next.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

namespace sm120 {

// cuMemCreate, exported as a file descriptor that travels over a Unix socket.
uint64_t vmm_granularity();
uint64_t vmm_allocate(uint64_t bytes, int* fd);  // device address; the caller closes the descriptor
uint64_t vmm_map(int fd, uint64_t bytes);
void vmm_release(uint64_t address, uint64_t bytes);

// cudaMalloc, exported as a 64-byte handle.
uint64_t ipc_allocate(uint64_t bytes, std::string* handle);
uint64_t ipc_map(const std::string& handle);
void ipc_unmap(uint64_t address);
void ipc_release(uint64_t address);

// Host memory that every process has mapped already.
uint64_t host_register(uint64_t address, uint64_t bytes);  // address for the device
void host_unregister(uint64_t address);

}  // namespace sm120
