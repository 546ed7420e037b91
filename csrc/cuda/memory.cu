// SPDX-License-Identifier: Apache-2.0
#include <cuda.h>
#include <unistd.h>

#include <cstring>
#include <stdexcept>

#include "channel.h"
#include "memory.h"

namespace sm120 {
namespace {

// The driver's functions come through the runtime, so that the library loads where there is no
// driver.
template <class Function>
Function driver(const char* name) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult found{};
  check(cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &found), name);
  if (address == nullptr || found != cudaDriverEntryPointSuccess) {
    throw std::runtime_error(std::string("this driver has no ") + name);
  }
  return reinterpret_cast<Function>(address);
}

void check_driver(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  driver<decltype(&cuGetErrorString)>("cuGetErrorString")(result, &text);
  throw std::runtime_error(std::string(what) + ": error " + std::to_string(result) + " (" +
                           (text != nullptr ? text : "unknown") + ")");
}

CUmemAllocationProp properties() {
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  CUmemAllocationProp p{};
  p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  p.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  p.location.id = device;
  p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  return p;
}

uint64_t map_handle(CUmemGenericAllocationHandle handle, uint64_t bytes) {
  CUdeviceptr address = 0;
  check_driver(
      driver<decltype(&cuMemAddressReserve)>("cuMemAddressReserve")(&address, bytes, 0, 0, 0),
      "cuMemAddressReserve");
  CUresult result = driver<decltype(&cuMemMap)>("cuMemMap")(address, bytes, 0, handle, 0);
  if (result == CUDA_SUCCESS) {
    CUmemAccessDesc access{};
    access.location = properties().location;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    result = driver<decltype(&cuMemSetAccess)>("cuMemSetAccess")(address, bytes, &access, 1);
    if (result != CUDA_SUCCESS) driver<decltype(&cuMemUnmap)>("cuMemUnmap")(address, bytes);
  }
  if (result != CUDA_SUCCESS) {
    driver<decltype(&cuMemAddressFree)>("cuMemAddressFree")(address, bytes);
    check_driver(result, "map the slab");
  }
  return address;
}

}  // namespace

uint64_t vmm_granularity() {
  check(cudaFree(nullptr), "create the context");
  const CUmemAllocationProp p = properties();
  size_t granularity = 0;
  check_driver(driver<decltype(&cuMemGetAllocationGranularity)>("cuMemGetAllocationGranularity")(
                   &granularity, &p, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
               "cuMemGetAllocationGranularity");
  return granularity;
}

uint64_t vmm_allocate(uint64_t bytes, int* fd) {
  const CUmemAllocationProp p = properties();
  CUmemGenericAllocationHandle handle = 0;
  check_driver(driver<decltype(&cuMemCreate)>("cuMemCreate")(&handle, bytes, &p, 0), "cuMemCreate");
  const auto release = driver<decltype(&cuMemRelease)>("cuMemRelease");
  const CUresult exported = driver<decltype(&cuMemExportToShareableHandle)>(
      "cuMemExportToShareableHandle")(fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
  if (exported != CUDA_SUCCESS) {
    release(handle);
    check_driver(exported, "cuMemExportToShareableHandle");
  }
  try {
    const uint64_t address = map_handle(handle, bytes);
    release(handle);  // the mapping and the descriptor keep the memory
    return address;
  } catch (...) {
    release(handle);
    close(*fd);
    throw;
  }
}

uint64_t vmm_map(int fd, uint64_t bytes) {
  CUmemGenericAllocationHandle handle = 0;
  check_driver(driver<decltype(&cuMemImportFromShareableHandle)>("cuMemImportFromShareableHandle")(
                   &handle, reinterpret_cast<void*>(static_cast<intptr_t>(fd)),
                   CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR),
               "cuMemImportFromShareableHandle");
  const auto release = driver<decltype(&cuMemRelease)>("cuMemRelease");
  try {
    const uint64_t address = map_handle(handle, bytes);
    release(handle);
    return address;
  } catch (...) {
    release(handle);
    throw;
  }
}

void vmm_release(uint64_t address, uint64_t bytes) {
  check_driver(driver<decltype(&cuMemUnmap)>("cuMemUnmap")(address, bytes), "cuMemUnmap");
  check_driver(driver<decltype(&cuMemAddressFree)>("cuMemAddressFree")(address, bytes),
               "cuMemAddressFree");
}

uint64_t ipc_allocate(uint64_t bytes, std::string* handle) {
  void* address = nullptr;
  check(cudaMalloc(&address, bytes), "allocate the slab");
  cudaIpcMemHandle_t h;
  const cudaError_t error = cudaIpcGetMemHandle(&h, address);
  if (error != cudaSuccess) {
    cudaFree(address);
    fail(error, "cudaIpcGetMemHandle");
  }
  handle->assign(reinterpret_cast<const char*>(&h), sizeof h);
  return reinterpret_cast<uint64_t>(address);
}

uint64_t ipc_map(const std::string& handle) {
  cudaIpcMemHandle_t h;
  if (handle.size() != sizeof h) throw std::invalid_argument("an IPC handle has 64 bytes");
  std::memcpy(&h, handle.data(), sizeof h);
  void* address = nullptr;
  check(cudaIpcOpenMemHandle(&address, h, cudaIpcMemLazyEnablePeerAccess), "cudaIpcOpenMemHandle");
  return reinterpret_cast<uint64_t>(address);
}

void ipc_unmap(uint64_t address) {
  check(cudaIpcCloseMemHandle(reinterpret_cast<void*>(address)), "cudaIpcCloseMemHandle");
}

void ipc_release(uint64_t address) {
  check(cudaFree(reinterpret_cast<void*>(address)), "free the slab");
}

uint64_t host_register(uint64_t address, uint64_t bytes) {
  void* host = reinterpret_cast<void*>(address);
  check(cudaHostRegister(host, bytes, cudaHostRegisterMapped | cudaHostRegisterPortable),
        "cudaHostRegister");
  void* device = nullptr;
  const cudaError_t error = cudaHostGetDevicePointer(&device, host, 0);
  if (error != cudaSuccess) {
    cudaHostUnregister(host);
    fail(error, "cudaHostGetDevicePointer");
  }
  return reinterpret_cast<uint64_t>(device);
}

void host_unregister(uint64_t address) {
  check(cudaHostUnregister(reinterpret_cast<void*>(address)), "cudaHostUnregister");
}

}  // namespace sm120
