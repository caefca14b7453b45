// Runs buckets on their data planes, one at a time, in the order the control plane gave them.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "collective/backend.h"
#include "common/error.h"
#include "engine/completion.h"
#include "engine/gpu_launcher.h"
#include "engine/handle.h"
#include "engine/interruption.h"
#include "engine/plane.h"
#include "engine/recorder.h"

namespace fusewire {

struct FinishedUnit {
  Handle handle;
  Result result;
  int64_t elements = 0;  // in the bucket
  UnitTrace trace{};
};

// One answered bucket. A group of mixed dtypes or devices makes several parts, run one after the other.
struct Assignment {
  bool uses_gpu() const {
    return std::any_of(parts.begin(), parts.end(), [](const Bucket& part) { return part.device == DeviceType::kCuda; });
  }

  uint64_t bucket = 0;
  uint32_t process_set = 0;
  bool report_completion = false;
  std::shared_ptr<Plane> plane;
  std::vector<Bucket> parts;
  std::vector<FinishedUnit> units;
  int64_t bytes = 0;
  std::shared_ptr<const Error> failure{};  // why it cannot run here: treated as if its data plane had failed
};

// Note [Inline buckets]
// A hand-over to another thread costs 25 to 40 us, more than most buckets. So a thread that waits for a handle runs
// whatever is at the head of the queue itself, of any size: it has nothing else to do. The coordinator thread runs
// small buckets itself and hands large ones to the executor thread, which is started when first needed, so that
// negotiation goes on meanwhile. `running_` makes sure that there is only one at a time, whoever it is.
//
// Note [Buckets on a GPU]
// When run() has launched such a bucket, its units are done, with the event to wait for in their results. The bucket
// itself has not come to its end: until the event is reached, this executor is busy(), which is what makes a peer's
// death abort the planes, and shutdown() wait; and only then the root is told. GpuLauncher's thread reports the end.
//
// Lock order: mutex_, then Completion's failure mutex. Held for a few instructions, never while a bucket runs or a
// callback is called.
class Executor {
 public:
  // `after_run` is called on whatever thread ran a bucket, with its outcome already visible in completed() etc.
  Executor(Completion& completion, Recorder& recorder, GpuLauncher& gpu, std::function<void()> after_run);
  ~Executor();

  void push(Assignment&& assignment);  // untouched if it throws (no memory)
  // False: nothing to run, or somebody is running. `by`: the caller, where signals may end its wait.
  bool run_one(const Interruption* by = nullptr) { return run_one_if(kAnySize, false, by); }
  bool run_one_if(int64_t bytes_at_most) { return run_one_if(bytes_at_most, false, nullptr); }  // for small ones only
  void hand_over();  // wakes the executor thread for what is queued
  bool has_runnable() const { return runnable_.load(std::memory_order_acquire); }
  bool busy() const;  // queued, running, or at work on the GPU

  // Numbers of buckets to report to the root. Cheap when there are none.
  std::vector<uint64_t> take_completed();
  bool has_completed() const { return has_completed_.load(std::memory_order_acquire); }

  // A data plane has thrown. The bucket's units stay unresolved until fail_all() tells them why: the first rank that
  // notices tells the root, and the root tells everybody the same.
  std::shared_ptr<const Error> trouble() const;
  bool has_trouble() const { return has_trouble_.load(std::memory_order_acquire); }

  // Unresolved units, and those queued for a set with `rank` in it; kAnyRank: all queued ones.
  static constexpr int kAnyRank = -1;
  void fail_all(const std::shared_ptr<const Error>& error, int rank = kAnyRank);
  void wait_until_drained(std::chrono::nanoseconds at_most);
  bool wait_for_device(std::chrono::nanoseconds at_most);  // false: it is still at work

  // What the launcher's thread reports: GpuWatch::Callbacks.
  void device_ended(const DeviceWork& work, std::optional<std::chrono::nanoseconds> took);
  void device_failed(const std::shared_ptr<Plane>& plane, const Error& error);
  void stop();  // joins the thread; idempotent

 private:
  static constexpr int64_t kAnySize = std::numeric_limits<int64_t>::max();
  bool run_one_if(int64_t bytes_at_most, bool on_own_thread, const Interruption* by);
  bool claim(int64_t bytes_at_most, Assignment& out);
  void run(Assignment assignment, bool on_own_thread, const Interruption* by);
  std::shared_ptr<const Error> run_parts(Assignment& assignment, const Interruption* by);
  SharedEvent follow(const Assignment& assignment, bool report_completion);
  void in_trouble(std::shared_ptr<const Error> error);  // under mutex_
  void thread_main();

  Completion& completion_;
  Recorder& recorder_;
  GpuLauncher& gpu_;
  const std::function<void()> after_run_;
  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable drained_;
  std::deque<Assignment> queue_;
  std::vector<uint64_t> completed_;
  std::vector<FinishedUnit> unresolved_;
  std::shared_ptr<const Error> trouble_;
  int on_device_ = 0;  // assignments with work on the GPU
  bool running_ = false;
  bool handed_over_ = false;
  bool stopping_ = false;
  std::atomic<bool> runnable_{false};
  std::atomic<bool> has_completed_{false};
  std::atomic<bool> has_trouble_{false};
  std::thread thread_;
};

}  // namespace fusewire
