// SPDX-License-Identifier: Apache-2.0
// The probe's kernels as tvm-ffi functions, used by sglang_sm120.fabric.gpu_driver. Addresses are
// integers.
#include "cuda/probe.h"

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

namespace sm120::ffi {
namespace {

using tvm::ffi::Array;
using tvm::ffi::Bytes;

std::vector<uint64_t> numbers(const Array<int64_t>& values) {
  std::vector<uint64_t> out;
  for (int64_t v : values) out.push_back(static_cast<uint64_t>(v));
  return out;
}

void clear(int64_t device, int64_t address, int64_t bytes) {
  probe_clear(static_cast<int>(device), address, bytes);
}

void push(int64_t device, Array<int64_t> targets, Array<int64_t> edges, int64_t bytes) {
  probe_push(static_cast<int>(device), numbers(targets), numbers(edges), bytes);
}

bool arrived(int64_t device, int64_t address, int64_t bytes, int64_t timeout_ns) {
  return probe_arrived(static_cast<int>(device), address, bytes, timeout_ns);
}

Bytes read(int64_t device, int64_t address, int64_t bytes) {
  return Bytes(probe_read(static_cast<int>(device), address, bytes));
}

int64_t ping(int64_t device, int64_t there, int64_t back, int64_t base, int64_t rounds,
             int64_t timeout_ns) {
  return probe_ping(static_cast<int>(device), there, back, static_cast<uint32_t>(base),
                    static_cast<uint32_t>(rounds), timeout_ns);
}

bool echo(int64_t device, int64_t here, int64_t back, int64_t base, int64_t rounds,
          int64_t timeout_ns) {
  return probe_echo(static_cast<int>(device), here, back, static_cast<uint32_t>(base),
                    static_cast<uint32_t>(rounds), timeout_ns);
}

Array<int64_t> stream(int64_t device, Array<int64_t> targets, int64_t bytes, Array<int64_t> tell,
                      Array<int64_t> hear, int64_t mark, int64_t timeout_ns) {
  Array<int64_t> out;
  for (int64_t ns : probe_stream(static_cast<int>(device), numbers(targets), bytes, numbers(tell),
                                 numbers(hear), static_cast<uint32_t>(mark), timeout_ns)) {
    out.push_back(ns);
  }
  return out;
}

int64_t fetch(int64_t device, int64_t source, int64_t bytes) {
  return probe_fetch(static_cast<int>(device), source, bytes);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(probe_clear, clear);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(probe_push, push);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(probe_arrived, arrived);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(probe_read, read);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(probe_ping, ping);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(probe_echo, echo);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(probe_stream, stream);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(probe_fetch, fetch);

}  // namespace sm120::ffi
