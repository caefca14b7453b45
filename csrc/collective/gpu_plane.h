// The data plane of one process set for CUDA tensors: NCCL where all its members can use it, host staging elsewhere.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include "collective/backend.h"
#include "collective/gpu_device.h"

namespace fusewire {

class NcclApi;
struct OpenGpu;

struct GpuPlaneOptions {
  int rank = 0;  // in the set
  int size = 1;
  int job_rank = 0;                        // the same rank in the job
  std::string kind = "auto";               // Config::gpu_backend
  std::chrono::nanoseconds abort_after{};  // 0: never give up
  bool nccl_shares_gpus = false;           // Config::nccl_shares_gpus
};

// What makes a set's plane: make_gpu_plane(), or what a test has in its place.
using GpuPlaneMaker = std::function<std::unique_ptr<Backend>(const OpenGpu& gpu, const GpuPlaneOptions& options,
                                                             Backend& cpu, std::string* why)>;

// Note [Which plane for a GPU]
// All members of a set must use the same plane, and what each can do only it knows. So when the set's first bucket of
// CUDA tensors runs, they tell each other over the plane for CPU tensors, and all decide the same from that: at the
// same place in the one order of buckets, so nobody waits for somebody who waits for something else. It is not done
// earlier, because a job that has no CUDA tensors must not touch a GPU.

// Throws Error(kCollective) where `options.kind` names a plane that cannot be had, on all members. `why` tells why it
// is not NCCL. `cpu` is the set's plane for CPU tensors and outlives the result; nothing else runs on it meanwhile.
std::unique_ptr<Backend> make_gpu_plane(const OpenGpu& gpu, const GpuPlaneOptions& options, Backend& cpu,
                                        std::string* why);

// A GPU, and the NCCL of this process.
struct OpenGpu {
  std::shared_ptr<GpuDevice> device;
  NcclApi* nccl = nullptr;  // lives as long as the process
  std::string no_nccl{};    // why there is none
  GpuPlaneMaker make_plane = make_gpu_plane;
};

}  // namespace fusewire
