#include "engine/gpu_launcher.h"

#include <string>
#include <utility>

#include "common/error.h"

namespace fusewire {
namespace {

// Note [Order on streams] in collective/cuda_api.h.
void wait_for_producers(GpuDevice& device, const Bucket& part) {
  const void* last = nullptr;
  const auto wait = [&](const TensorView& view) {
    if (view.ready_event == nullptr || view.ready_event == last) return;
    device.api().wait(device.stream(), view.ready_event);
    last = view.ready_event;
  };
  for (const Segment& segment : part.segments) {
    wait(segment.input);
    wait(segment.output);
  }
}

}  // namespace

GpuLauncher::GpuLauncher(int rank, GpuOpener opener, GpuPlaneOptions options)
    : rank_(rank), opener_(std::move(opener)), options_(std::move(options)) {}

void GpuLauncher::claim(const Device& device) {
  if (!opener_) {
    throw Error(ErrorCode::kInvalidArgument,
                "the tensor is on a GPU, but this build of Fusewire, or this process, has no CUDA");
  }
  int used = index_.load(std::memory_order_relaxed);
  if (device.index < 0 || device.index == used) return;
  if (used < 0 && index_.compare_exchange_strong(used, device.index, std::memory_order_relaxed)) return;
  if (used == device.index) return;
  throw Error(ErrorCode::kInvalidArgument, "the tensor is on cuda:" + std::to_string(device.index) +
                                               ", but Fusewire uses cuda:" + std::to_string(used) +
                                               " on this rank, where its first CUDA tensor was; one rank uses one GPU");
}

void GpuLauncher::open() {
  if (gpu_.device) return;
  if (!opener_) {
    throw Error(ErrorCode::kCollective,
                "rank " + std::to_string(rank_) +
                    " cannot take part in a collective on CUDA tensors: its build of Fusewire, or its process, has no "
                    "CUDA");
  }
  gpu_ = opener_(index_.load(std::memory_order_relaxed));
  int unknown = -1;
  index_.compare_exchange_strong(unknown, gpu_.device->index(), std::memory_order_relaxed);
}

Backend& GpuLauncher::plane_of(Plane& set) const {
  if (Backend* const made = set.gpu.get()) return *made;
  GpuPlaneOptions options = options_;
  options.rank = set.number_of(rank_);
  options.size = static_cast<int>(set.ranks.size());
  std::string why;
  set.gpu.put(gpu_.make_plane(gpu_, options, *set.backend, &why), std::move(why));
  return *set.gpu.get();
}

void GpuLauncher::launch(const Bucket& part, Plane& set) {
  open();
  Backend& plane = plane_of(set);
  wait_for_producers(*gpu_.device, part);
  plane.run(part);
}

SharedEvent GpuLauncher::mark() const {
  if (!gpu_.device) return nullptr;
  try {
    return gpu_.device->mark();
  } catch (const Error&) {
    return nullptr;
  }
}

}  // namespace fusewire
