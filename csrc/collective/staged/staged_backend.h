// The data plane for CUDA tensors by way of host memory: pinned buffers, and the set's plane for CPU tensors between
// them. It works wherever that one does, with one GPU for all ranks or a GPU each.
#pragma once

#include <cstddef>
#include <memory>

#include "collective/backend.h"
#include "collective/gpu_device.h"
#include "collective/gpu_plane.h"

namespace fusewire {

// What goes through the host at a time. Large enough that a chunk's copies take longer than starting them does, small
// enough that the first and the last chunk's copies, which overlap nothing, are a small part of a fused bucket. Equal
// on all ranks.
constexpr size_t kStagedChunkBytes = size_t{4} << 20;

// `cpu` is the set's plane for CPU tensors and outlives the result; nothing else runs on it meanwhile. Results are its
// results, bit for bit.
std::unique_ptr<Backend> make_staged_backend(std::shared_ptr<GpuDevice> device, const GpuPlaneOptions& options,
                                             Backend& cpu, size_t chunk_bytes = kStagedChunkBytes);

}  // namespace fusewire
