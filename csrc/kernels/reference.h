// Internal to this folder: the plain path, which the vector tables fall back to.
#pragma once

#include "kernels/kernels.h"

namespace fusewire {

extern const CpuKernels kReferenceKernels;

// Elements [begin, end) of a reduction, `args.second` left out; for what does not fill a vector.
void reduce_plainly(const ReduceArgs& args, size_t begin, size_t end);
void combine_plainly(const CombineArgs& args, size_t begin, size_t end);

}  // namespace fusewire
