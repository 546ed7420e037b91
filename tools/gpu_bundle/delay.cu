// The one function of FlashInfer's `trtllm_utils` that its tuner calls: hold a stream back while the host queues work.
// FlashInfer's own source needs cuBLAS headers and all of TensorRT-LLM's; without the module every tactic "fails".
#include <cuda_runtime.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

namespace {

__global__ void hold(long long microseconds) {
  for (long long i = 0; i < microseconds; ++i) __nanosleep(1000);
}

void delay_kernel(int64_t microseconds) {
  int device = 0;
  if (cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) TVM_FFI_THROW(RuntimeError) << cudaGetErrorString(e);
  auto stream = static_cast<cudaStream_t>(TVMFFIEnvGetStream(kDLCUDA, device));
  hold<<<1, 1, 0, stream>>>(microseconds);
  if (cudaError_t e = cudaGetLastError(); e != cudaSuccess) TVM_FFI_THROW(RuntimeError) << cudaGetErrorString(e);
}

}  // namespace

TVM_FFI_DLL_EXPORT_TYPED_FUNC(delay_kernel, delay_kernel);
