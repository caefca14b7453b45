// Adasum (collective/adasum.h) of CUDA tensors, on the devices from end to end.
#pragma once

#include "collective/nccl/nccl_context.h"

namespace fusewire {

// For sets of two members or more. Puts everything on the device's stream and waits for nothing.
void nccl_adasum(NcclContext& context, const Bucket& bucket);

}  // namespace fusewire
