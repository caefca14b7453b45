// The GPU of one engine: opened when the first bucket of CUDA tensors is to run, and what such a bucket needs around
// its data plane.
#pragma once

#include <atomic>
#include <memory>

#include "collective/gpu_plane.h"
#include "common/types.h"
#include "engine/engine.h"
#include "engine/gpu_watch.h"
#include "engine/plane.h"

namespace fusewire {

// launch() and follow() are called by one thread at a time, claim() by any.
class GpuLauncher {
 public:
  // `options`: rank and size are filled in per set.
  GpuLauncher(int rank, GpuOpener opener, GpuPlaneOptions options, GpuWatch::Callbacks callbacks);

  // On a submitter's thread: a tensor lies there. Throws Error(kInvalidArgument) where there is no CUDA, or the engine
  // uses another GPU.
  void claim(const Device& device);

  // Puts the work of a part whose tensors are on the GPU on its stream, after that of those who have made the tensors.
  // Throws Error; its rank is one of the set's. `timed`: how long it takes there is of interest.
  void launch(const Bucket& part, Plane& set, bool timed);

  // Has what an assignment has launched followed to its end, well or not. The result is that end; null where there is
  // nothing to follow, because the GPU could not be opened or CUDA has failed.
  SharedEvent follow(DeviceWork work);

  // Follows no longer, see GpuWatch. Nobody launches any more.
  void stop();

 private:
  void open(const Plane& set);
  Backend& plane_of(Plane& set) const;

  const int rank_;
  const GpuOpener opener_;
  const GpuPlaneOptions options_;
  const GpuWatch::Callbacks callbacks_;
  std::atomic<int> index_{-1};  // of the GPU; -1: none has been seen yet
  OpenGpu gpu_;
  SharedEvent begin_;  // of the assignment that is being launched, if timed
  std::unique_ptr<GpuWatch> watch_;
};

}  // namespace fusewire
