#include "kernels/cuda/launchers.h"

namespace fusewire {

extern const CudaKernels kCudaKernels = {cuda::pack,    cuda::unpack,   cuda::reduce,    cuda::dot,
                                         cuda::combine, cuda::quantise, cuda::dequantise};

}  // namespace fusewire
