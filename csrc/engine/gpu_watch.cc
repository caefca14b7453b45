#include "engine/gpu_watch.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/thread.h"

namespace fusewire {
namespace {

constexpr std::chrono::seconds kLookEvery{1};

Error stalled(const Plane& plane, std::chrono::nanoseconds abort_after) {
  const std::vector<int> late = plane.gpu.get()->laggards();
  return {ErrorCode::kStalled,
          "work that all ranks were to launch on their GPUs has not ended for " +
              std::to_string(std::chrono::duration<double>(abort_after).count()) +
              " s: a rank has not launched its part, or a GPU or the way between GPUs is stuck. "
              "FUSEWIRE_STALL_ABORT_TIME sets how long to wait.",
          late.empty() ? -1 : late.front()};
}

}  // namespace

GpuWatch::GpuWatch(std::shared_ptr<GpuDevice> device, std::chrono::nanoseconds abort_after, Callbacks callbacks)
    : device_(std::move(device)),
      abort_after_(abort_after),
      callbacks_(std::move(callbacks)),
      side_(device_->api().create_stream()) {
  thread_ = start_thread("fw-gpu", [this] { thread_main(); });
}

void GpuWatch::follow(DeviceWork work) {
  work.launched = Clock::now();
  const std::lock_guard lock(desk_->mutex);
  desk_->work.push_back(std::move(work));
  if (desk_->work.size() == 1) desk_->wake.notify_one();  // else it is busy with those before
}

void GpuWatch::stop() {
  {
    const std::lock_guard lock(desk_->mutex);
    desk_->stopping = true;
  }
  desk_->wake.notify_one();
  if (!thread_.joinable()) return;
  thread_.join();
  if (!desk_->work.empty()) {
    // Nobody can tell when the GPU will be done with it, so whatever it uses stays until the process ends.
    static_cast<void>(std::make_unique<std::shared_ptr<Desk>>(desk_).release());
    return;
  }
  try {
    device_->api().destroy_stream(side_);
  } catch (const Error&) {
    // At the end of a process the driver may be gone already.
  }
}

// On a thread of CUDA's.
void GpuWatch::ring(void* desk) {
  const std::unique_ptr<std::shared_ptr<Desk>> owner(static_cast<std::shared_ptr<Desk>*>(desk));
  const std::lock_guard lock((*owner)->mutex);
  (*owner)->rung = true;
  (*owner)->wake.notify_one();
}

void GpuWatch::call_when_reached(const SharedEvent& event) {
  {
    const std::lock_guard lock(desk_->mutex);
    desk_->rung = false;
  }
  event->hold_up(side_);
  auto owner = std::make_unique<std::shared_ptr<Desk>>(desk_);
  device_->api().call(side_, &GpuWatch::ring, owner.get());
  static_cast<void>(owner.release());  // ring() has it
}

void GpuWatch::thread_main() {
  for (;;) {
    DeviceWork oldest;
    {
      std::unique_lock lock(desk_->mutex);
      desk_->wake.wait(lock, [this] { return desk_->stopping || !desk_->work.empty(); });
      if (desk_->stopping && desk_->work.empty()) return;
      oldest = desk_->work.front();
    }
    try {
      if (!wait_for(oldest)) return;
    } catch (const Error& error) {
      fail(oldest.plane, error);  // CUDA's: nothing runs any more
    }
    {
      const std::lock_guard lock(desk_->mutex);
      desk_->work.pop_front();
    }
    end(oldest);
  }
}

// False: stop() came first.
bool GpuWatch::wait_for(const DeviceWork& work) {
  if (work.end->reached()) return true;
  call_when_reached(work.end);
  for (;;) {
    Clock::time_point now = Clock::now();
    if (now >= look_at_) {
      look_after(work, now);
      now = Clock::now();
      look_at_ = now + kLookEvery;
      const Clock::time_point late = due(work);
      if (late > now) look_at_ = std::min(look_at_, late);
    }
    bool stopping = false;
    {
      std::unique_lock lock(desk_->mutex);
      desk_->wake.wait_until(lock, look_at_, [this] { return desk_->rung || desk_->stopping; });
      desk_->rung = false;
      stopping = desk_->stopping;
    }
    if (work.end->reached()) return true;
    if (stopping) return false;
  }
}

// When it is too late for the oldest work to end.
GpuWatch::Clock::time_point GpuWatch::due(const DeviceWork& oldest) const {
  if (abort_after_.count() <= 0) return Clock::time_point::max();
  return std::max(oldest.launched, last_ended_) + abort_after_;
}

void GpuWatch::look_after(const DeviceWork& oldest, Clock::time_point now) {
  std::vector<std::shared_ptr<Plane>> planes;
  {
    const std::lock_guard lock(desk_->mutex);
    for (const DeviceWork& work : desk_->work) {
      if (std::find(planes.begin(), planes.end(), work.plane) == planes.end()) planes.push_back(work.plane);
    }
  }
  for (const auto& plane : planes) {
    if (plane->gpu.aborted() || plane->gpu.get() == nullptr) continue;
    try {
      plane->gpu.get()->check();
    } catch (const Error& error) {
      fail(plane, error);
    }
  }
  const Plane& plane = *oldest.plane;
  if (plane.gpu.aborted() || plane.gpu.get() == nullptr) return;
  if (now >= due(oldest)) fail(oldest.plane, stalled(plane, abort_after_));
}

void GpuWatch::fail(const std::shared_ptr<Plane>& plane, const Error& error) {
  callbacks_.failed(plane, error);  // first, or the abort is taken for the reason
  plane->abort();
}

void GpuWatch::end(const DeviceWork& work) {
  last_ended_ = Clock::now();
  std::optional<std::chrono::nanoseconds> took;
  try {
    if (work.begin) {
      const double ms = device_->api().elapsed_ms(work.begin->get(), work.end->get());
      took = std::chrono::nanoseconds(static_cast<int64_t>(ms * 1e6));
    }
  } catch (const Error&) {
    // It has failed, and the plane's users have been told.
  }
  callbacks_.ended(work, took);
}

}  // namespace fusewire
