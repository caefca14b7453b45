// The GPU of one engine: opened when the first bucket of CUDA tensors is to run, and what such a bucket needs around
// its data plane.
#pragma once

#include <atomic>
#include <memory>

#include "collective/gpu_plane.h"
#include "common/types.h"
#include "engine/engine.h"
#include "engine/plane.h"

namespace fusewire {

class GpuLauncher {
 public:
  // `options`: rank and size are filled in per set.
  GpuLauncher(int rank, GpuOpener opener, GpuPlaneOptions options);

  // On a submitter's thread: a tensor lies there. Throws Error(kInvalidArgument) where there is no CUDA, or the engine
  // uses another GPU.
  void claim(const Device& device);

  // Puts the work of a part whose tensors are on the GPU on its stream, after that of those who have made the tensors.
  // By one thread at a time. Throws Error; its rank is one of the set's.
  void launch(const Bucket& part, Plane& set);

  // An event after all that has been launched so far; null where there is nothing to wait for, because the GPU could
  // not be opened or CUDA has failed.
  SharedEvent mark() const;

 private:
  void open();
  Backend& plane_of(Plane& set) const;

  const int rank_;
  const GpuOpener opener_;
  const GpuPlaneOptions options_;
  std::atomic<int> index_{-1};  // of the GPU; -1: none has been seen yet
  OpenGpu gpu_;
};

}  // namespace fusewire
