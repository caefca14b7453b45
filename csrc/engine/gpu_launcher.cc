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

GpuLauncher::GpuLauncher(int rank, GpuOpener opener, GpuPlaneOptions options, GpuWatch::Callbacks callbacks)
    : rank_(rank), opener_(std::move(opener)), options_(std::move(options)), callbacks_(std::move(callbacks)) {}

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

void GpuLauncher::open(const Plane& set) {
  if (watch_) return;
  const auto cannot = [&](const std::string& why) {
    return Error(ErrorCode::kCollective,
                 "rank " + std::to_string(rank_) + " cannot take part in a collective on CUDA tensors: " + why,
                 set.number_of(rank_));
  };
  if (!opener_) throw cannot("its build of Fusewire, or its process, has no CUDA");
  try {
    gpu_ = opener_(index_.load(std::memory_order_relaxed));
    watch_ = std::make_unique<GpuWatch>(gpu_.device, options_.abort_after, callbacks_);
  } catch (const std::exception& error) {
    throw cannot(error.what());
  }
  int unknown = -1;
  index_.compare_exchange_strong(unknown, gpu_.device->index(), std::memory_order_relaxed);
}

Backend& GpuLauncher::plane_of(Plane& set) const {
  if (Backend* const made = set.gpu.get()) return *made;
  GpuPlaneOptions options = options_;
  options.rank = set.number_of(rank_);
  options.size = static_cast<int>(set.ranks.size());
  options.job_rank = rank_;
  std::string why;
  std::unique_ptr<Backend> plane = gpu_.make_plane(gpu_, options, *set.backend, &why);
  set.gpu.put(std::move(plane), std::move(why));
  return *set.gpu.get();
}

void GpuLauncher::launch(const Bucket& part, Plane& set, bool timed) {
  open(set);
  Backend& plane = plane_of(set);
  wait_for_producers(*gpu_.device, part);
  if (timed && !begin_) begin_ = gpu_.device->mark(gpu_.device->stream(), true);
  plane.run(part);
}

SharedEvent GpuLauncher::follow(DeviceWork work) {
  if (!watch_) return nullptr;
  try {
    work.begin = std::exchange(begin_, nullptr);
    work.end = gpu_.device->mark(gpu_.device->stream(), work.begin != nullptr);
  } catch (const Error&) {
    return nullptr;
  }
  SharedEvent end = work.end;
  watch_->follow(std::move(work));
  return end;
}

void GpuLauncher::stop() {
  if (watch_) watch_->stop();
}

}  // namespace fusewire
