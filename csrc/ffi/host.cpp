// SPDX-License-Identifier: Apache-2.0
// The host engine as tvm-ffi functions. A group is an integer handle; sglang_sm120.comm.host owns
// it.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>

#include "ffi/common.h"
#include "host/group.h"

namespace sm120::ffi {
namespace {

using host::Args;
using host::Group;
using tvm::ffi::Array;
using tvm::ffi::String;
using tvm::ffi::TensorView;

Group& group_of(int64_t handle) { return *reinterpret_cast<Group*>(handle); }

int64_t host_open(String session, int64_t rank, int64_t world, String islands, int64_t channels,
                  int64_t capacity, int64_t timeout_ms, int64_t join_timeout_ms, int64_t schedule,
                  bool int8, bool fp32_partials, int64_t ctas) {
  host::GroupConfig config;
  config.session = session;
  config.rank = static_cast<int>(rank);
  config.topology = topology_from(world, islands);
  config.channels = static_cast<int>(channels);
  config.capacity = static_cast<uint64_t>(capacity);
  config.timeout_ms = static_cast<uint64_t>(timeout_ms);
  config.join_timeout_ms = static_cast<uint64_t>(join_timeout_ms);
  config.schedule = static_cast<int>(schedule);
  config.int8 = int8;
  config.fp32_partials = fp32_partials;
  config.ctas = static_cast<uint16_t>(ctas);
  return reinterpret_cast<int64_t>(new Group(config));
}

void host_free(int64_t handle) { delete &group_of(handle); }
void host_close(int64_t handle, int64_t channel) {
  group_of(handle).close(static_cast<int>(channel));
}

bool host_admits(int64_t handle, int64_t hidden, int64_t dtype) {
  return hidden > 0 && hidden < (int64_t{1} << 31) &&
         group_of(handle).admits(static_cast<uint32_t>(hidden), static_cast<Dtype>(dtype));
}

Args args_of(Op op, const TensorView& x, int64_t hidden) {
  Args args;
  args.op = op;
  args.dtype = dtype_from(x.dtype());
  args.shape = make_shape(static_cast<uint32_t>(hidden == 0 ? 0 : x.numel() / hidden),
                          static_cast<uint32_t>(hidden));
  args.x = data(x);
  return args;
}

void host_all_reduce(int64_t handle, int64_t channel, TensorView x, TensorView out) {
  Args args = args_of(Op::kAllReduce, x, x.size(-1));
  args.out = data(out);
  group_of(handle).run(static_cast<int>(channel), args);
}

Args norm_args(Op op, const TensorView& x, const TensorView& residual, const TensorView& weight,
               double eps, bool gemma, const TensorView& out, const TensorView& residual_out) {
  Args args = args_of(op, x, x.size(-1));
  args.residual = data(residual);
  args.weight = data(weight);
  args.weight_f32 = dtype_from(weight.dtype()) == Dtype::kF32;
  args.eps = static_cast<float>(eps);
  args.gemma = gemma;
  args.out = data(out);
  args.residual_out = data(residual_out);
  return args;
}

void host_all_reduce_rmsnorm(int64_t handle, int64_t channel, TensorView x, TensorView residual,
                             TensorView weight, double eps, bool gemma, TensorView out,
                             TensorView residual_out) {
  group_of(handle).run(static_cast<int>(channel), norm_args(Op::kAllReduceRmsNorm, x, residual,
                                                            weight, eps, gemma, out, residual_out));
}

void host_all_reduce_rmsnorm_fp8(int64_t handle, int64_t channel, TensorView x, TensorView residual,
                                 TensorView weight, double eps, bool gemma, TensorView out,
                                 TensorView residual_out, TensorView codes, TensorView scales) {
  Args args =
      norm_args(Op::kAllReduceRmsNormFp8, x, residual, weight, eps, gemma, out, residual_out);
  args.codes = static_cast<uint8_t*>(data(codes));
  args.scales = static_cast<float*>(data(scales));
  group_of(handle).run(static_cast<int>(channel), args);
}

// [valid, rank, channel, phase, tile, source, op, dtype, rows, hidden, call, waited_ns]
Array<int64_t> host_flight(int64_t handle, int64_t channel) {
  const FlightRecord& f = group_of(handle).engine(static_cast<int>(channel)).page()->flight;
  return {f.valid,
          f.rank,
          f.channel,
          f.phase,
          f.tile,
          f.source,
          f.op,
          f.dtype,
          f.rows,
          f.hidden,
          static_cast<int64_t>(f.call),
          static_cast<int64_t>(f.waited_ns)};
}

// Bytes of tiles this rank has stored into each peer's slab.
Array<int64_t> host_payload_bytes(int64_t handle, int64_t channel) {
  const host::Engine& engine = group_of(handle).engine(static_cast<int>(channel));
  Array<int64_t> bytes;
  for (int r = 0; r < group_of(handle).config().topology.world; ++r) {
    bytes.push_back(static_cast<int64_t>(engine.payload_bytes()[r]));
  }
  return bytes;
}

void host_set_timeout_ms(int64_t handle, int64_t timeout_ms) {
  group_of(handle).set_timeout_ms(static_cast<uint64_t>(timeout_ms));
}

void host_kill_self_at(int64_t handle, int64_t call, int64_t phase) {
  group_of(handle).kill_self_at(static_cast<uint64_t>(call), static_cast<int>(phase));
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(host_open, host_open);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(host_free, host_free);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(host_close, host_close);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(host_admits, host_admits);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(host_all_reduce, host_all_reduce);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(host_all_reduce_rmsnorm, host_all_reduce_rmsnorm);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(host_all_reduce_rmsnorm_fp8, host_all_reduce_rmsnorm_fp8);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(host_flight, host_flight);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(host_payload_bytes, host_payload_bytes);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(host_set_timeout_ms, host_set_timeout_ms);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(host_kill_self_at, host_kill_self_at);

}  // namespace sm120::ffi
