// Follows what buckets have left on a GPU until it is done, on a thread of its own ("fw-gpu").
//
// Note [Following a GPU]
// A bucket's units are done when its work is on the stream, but much depends on when that work ends: the root hears of
// a bucket only then (so while the GPU is busy, tensors gather in larger buckets), what it has used may be dropped only
// then, and if it never ends somebody has to notice. All work of an engine is on one stream, so its marks are reached
// in the order of their launches, and one thread that waits for the oldest is enough. It does not block in CUDA, where
// nothing but the GPU could wake it: a second stream waits for the mark and then calls ring(), and the thread sleeps
// until that, or until it is time to look after the planes.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "collective/gpu_device.h"
#include "common/error.h"
#include "common/types.h"
#include "engine/plane.h"

namespace fusewire {

// What one assignment has left on the GPU.
struct DeviceWork {
  std::shared_ptr<Plane> plane;
  uint64_t bucket = 0;
  uint32_t process_set = 0;
  OpKind kind = OpKind::kAllreduce;
  bool report_completion = false;
  SharedEvent begin{};  // null: nobody asks how long it takes
  SharedEvent end{};
  std::chrono::steady_clock::time_point launched{};
};

// Lock order: the mutex is a leaf; neither CUDA nor a callback is called while it is held.
class GpuWatch {
 public:
  using Clock = std::chrono::steady_clock;
  struct Callbacks {  // on this thread, under no lock
    // In the order of launches. `took` is there where `begin` is. After an abort the work has ended, too, but badly.
    std::function<void(const DeviceWork&, std::optional<std::chrono::nanoseconds> took)> ended;
    // A plane has failed, and is aborted next, so that what it has on the GPU ends soon. The error's rank is one of the
    // set's.
    std::function<void(const std::shared_ptr<Plane>&, const Error&)> failed;
  };

  // `abort_after`: how long the oldest work may take; 0: for ever. Starts the thread.
  GpuWatch(std::shared_ptr<GpuDevice> device, std::chrono::nanoseconds abort_after, Callbacks callbacks);
  ~GpuWatch() { stop(); }
  GpuWatch(const GpuWatch&) = delete;
  GpuWatch& operator=(const GpuWatch&) = delete;

  void follow(DeviceWork work);
  void stop();  // joins the thread; what has not ended by then is not followed any more, and kept. Idempotent

 private:
  // Outlives this where the GPU may still ring.
  struct Desk {
    std::mutex mutex;
    std::condition_variable wake;
    std::deque<DeviceWork> work;  // oldest first; the first one stays here until it has ended
    bool rung = false;
    bool stopping = false;
  };
  static void ring(void* desk);

  void thread_main();
  void call_when_reached(const SharedEvent& event);
  bool wait_for(const DeviceWork& work);
  Clock::time_point due(const DeviceWork& oldest) const;
  void look_after(const DeviceWork& oldest, Clock::time_point now);
  void fail(const std::shared_ptr<Plane>& plane, const Error& error);
  void end(const DeviceWork& work);

  const std::shared_ptr<GpuDevice> device_;
  const std::chrono::nanoseconds abort_after_;
  const Callbacks callbacks_;
  const CudaApi::Stream side_;
  const std::shared_ptr<Desk> desk_ = std::make_shared<Desk>();
  Clock::time_point look_at_{};     // when the planes are looked after next
  Clock::time_point last_ended_{};  // of the work before the oldest
  std::thread thread_;
};

}  // namespace fusewire
