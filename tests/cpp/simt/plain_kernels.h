// The CUDA kernels once more, as loops: for ThreadSanitizer, which cannot follow the fibers of stand_in.h.
#pragma once

#include "kernels/cuda_kernels.h"

namespace fusewire::testing {

// The same bits as kCudaKernels, in whatever order those run. Where FUSEWIRE_PLAIN_KERNELS is defined, kCudaKernels is
// this table.
extern const CudaKernels kPlainKernels;

}  // namespace fusewire::testing
