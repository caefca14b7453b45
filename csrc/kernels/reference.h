// Internal to this folder: the table of the plain path.
#pragma once

#include "kernels/kernels.h"

namespace fusewire {

extern const CpuKernels kReferenceKernels;

}  // namespace fusewire
