// Ranks with a GPU each, as threads: every one has a CudaDouble of its own, and a shared-memory plane to the others.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collective/gpu_device.h"
#include "collective/gpu_plane.h"
#include "shm_world.h"
#include "simt/cuda_double.h"

namespace fusewire::testing {

// A GPU, and what it has found wrong when it goes.
class GpuOfRank {
 public:
  explicit GpuOfRank(uint64_t seed, std::shared_ptr<CudaWorld> world = nullptr)
      : cuda(std::make_shared<CudaDouble>(seed, std::move(world))),
        device(std::make_shared<GpuDevice>(cuda, 0, cuda->create_stream())) {}

  // One sentence per mistake, "" if there was none.
  std::string mistakes() const {
    std::string text;
    for (const std::string& mistake : cuda->mistakes()) text += mistake + "; ";
    return text;
  }

  const std::shared_ptr<CudaDouble> cuda;
  const std::shared_ptr<GpuDevice> device;
};

inline size_t extent_bytes(const TensorView& view) {
  if (view.numel() == 0) return 0;
  int64_t last = 0;
  for (size_t d = 0; d < view.sizes.size(); ++d) last += (view.sizes[d] - 1) * view.strides[d];
  return static_cast<size_t>(last + 1) * size_of(view.dtype);
}

// The host reads and writes what the bucket names: an error where work on the GPU still might.
inline void host_uses(CudaDouble& cuda, const Bucket& bucket) {
  for (const Segment& segment : bucket.segments) {
    if (segment.input.data != nullptr) cuda.host_uses(segment.input.data, extent_bytes(segment.input), false);
    if (segment.output.data != nullptr) cuda.host_uses(segment.output.data, extent_bytes(segment.output), true);
  }
}

// A plane that says what the host does when it runs a bucket.
class OnHost : public Backend {
 public:
  OnHost(Backend& plane, CudaDouble& cuda) : plane_(plane), cuda_(cuda) {}
  std::string_view name() const override { return plane_.name(); }
  void run(const Bucket& bucket) override {
    host_uses(cuda_, bucket);
    ++runs;
    plane_.run(bucket);
  }
  void abort() noexcept override { plane_.abort(); }
  void check() override { plane_.check(); }
  std::vector<int> laggards() const override { return plane_.laggards(); }

  int runs = 0;

 private:
  Backend& plane_;
  CudaDouble& cuda_;
};

// A device plane for tests that look at results when run() returns. Whatever the bucket named must be at rest by what
// is on the device's stream then (backend.h Note [Device planes]).
class ToTheEnd : public Backend {
 public:
  ToTheEnd(Backend& plane, const GpuOfRank& gpu) : plane_(plane), gpu_(gpu) {}
  std::string_view name() const override { return plane_.name(); }
  void run(const Bucket& bucket) override {
    plane_.run(bucket);
    gpu_.device->mark()->synchronize();
    for (const Segment& segment : bucket.segments) {
      for (const TensorView* view : {&segment.input, &segment.output}) {
        if (view->data != nullptr) gpu_.cuda->host_uses(view->data, extent_bytes(*view), true);
      }
    }
  }
  void abort() noexcept override { plane_.abort(); }
  void check() override { plane_.check(); }
  std::vector<int> laggards() const override { return plane_.laggards(); }

 private:
  Backend& plane_;
  const GpuOfRank& gpu_;
};

}  // namespace fusewire::testing
