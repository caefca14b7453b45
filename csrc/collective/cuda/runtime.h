// CudaApi on a real GPU, by the CUDA runtime. No CUDA header is needed to include this.
#pragma once

#include <memory>

#include "collective/cuda_api.h"

namespace fusewire {

// Works on `device` whichever the calling thread's current device is, and leaves that as it was.
std::unique_ptr<CudaApi> make_cuda_runtime(int device, const CudaKernels& kernels);

}  // namespace fusewire
