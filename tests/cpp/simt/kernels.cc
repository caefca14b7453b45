// The CUDA kernels as C++: what nvcc compiles for a GPU runs on the CPU's stand-in here.
#include <cstddef>

#include "simt/stand_in.h"

#pragma GCC diagnostic ignored "-Wunknown-pragmas"  // unroll

// clang-format off
#include "kernels/cuda/pack.cu"
#include "kernels/cuda/unpack.cu"
#include "kernels/cuda/reduce.cu"
#include "kernels/cuda/adasum.cu"
#include "kernels/cuda/int8.cu"
#include "kernels/cuda/table.cu"
// clang-format on
