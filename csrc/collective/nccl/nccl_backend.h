// The data plane for CUDA tensors over NCCL. See nccl_*.cc, one algorithm per file.
#pragma once

#include <memory>

#include "collective/gpu_plane.h"
#include "collective/nccl/nccl_context.h"

namespace fusewire {

// Makes the communicator: all members of the set call it at the same place in the order of their buckets. `cpu`, the
// set's plane for CPU tensors, carries what members have to tell each other, also later, inside of run(). It outlives
// the result. Throws as nccl_link.h says.
std::unique_ptr<Backend> make_nccl_backend(std::shared_ptr<GpuDevice> device, NcclApi& api,
                                           const GpuPlaneOptions& options, Backend& cpu, const NcclTuning& tuning = {});

}  // namespace fusewire
