#include "engine/executor.h"

#include <string>
#include <system_error>
#include <utility>

#include "common/thread.h"

namespace fusewire {
namespace {

// A data plane counts ranks inside its process set; users know global ones.
std::shared_ptr<const Error> explain(const Error& error, const Plane& plane) {
  if (error.rank() < 0) return std::make_shared<Error>(error);
  const int rank = plane.ranks.at(static_cast<size_t>(error.rank()));
  if (error.code() != ErrorCode::kStalled) return std::make_shared<Error>(error.code(), error.what(), rank);
  return std::make_shared<Error>(
      ErrorCode::kStalled,
      "a collective that all ranks had started stopped making progress: rank " + std::to_string(rank) +
          " is behind (stopped, swapping or killed?). Look at that process; FUSEWIRE_STALL_ABORT_TIME sets how long to "
          "wait.",
      rank);
}

}  // namespace

Executor::Executor(Completion& completion, Recorder& recorder, GpuLauncher& gpu, std::function<void()> after_run)
    : completion_(completion), recorder_(recorder), gpu_(gpu), after_run_(std::move(after_run)) {}

Executor::~Executor() { stop(); }

void Executor::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void Executor::push(Assignment&& assignment) {
  const std::lock_guard lock(mutex_);
  queue_.push_back(std::move(assignment));
  runnable_.store(!running_, std::memory_order_release);
}

bool Executor::claim(int64_t bytes_at_most, Assignment& out) {
  if (!has_runnable()) return false;
  const std::lock_guard lock(mutex_);
  if (running_ || queue_.empty()) return false;
  // Small ones only: and none that may wait for a GPU to end what is before it, or for a communicator to be made.
  if (bytes_at_most != kAnySize && (queue_.front().bytes > bytes_at_most || queue_.front().uses_gpu())) return false;
  running_ = true;
  runnable_.store(false, std::memory_order_release);
  out = std::move(queue_.front());
  queue_.pop_front();
  return true;
}

bool Executor::run_one_if(int64_t bytes_at_most, bool on_own_thread, const Interruption* by) {
  Assignment assignment;
  if (!claim(bytes_at_most, assignment)) return false;
  run(std::move(assignment), on_own_thread, by);
  return true;
}

// Why it failed; null: all went well.
std::shared_ptr<const Error> Executor::run_parts(Assignment& assignment, const Interruption* by) {
  Plane& plane = *assignment.plane;
  try {
    for (Bucket& part : assignment.parts) {
      if (by != nullptr) part.on_signal = by->ask();
      if (part.device == DeviceType::kCuda) {
        gpu_.launch(part, plane, recorder_.timeline().on());
      } else {
        plane.backend->run(part);
      }
    }
    return nullptr;
  } catch (const Error& e) {
    return by != nullptr && by->error() ? by->error() : explain(e, plane);
  } catch (const std::exception& e) {
    return std::make_shared<Error>(ErrorCode::kCollective,
                                   std::string(plane.backend->name()) + " data plane: " + e.what());
  }
}

// Null: nothing is left on a device.
SharedEvent Executor::follow(const Assignment& assignment, bool report_completion) {
  {
    const std::lock_guard lock(mutex_);
    ++on_device_;
  }
  SharedEvent end = gpu_.follow({.plane = assignment.plane,
                                 .bucket = assignment.bucket,
                                 .process_set = assignment.process_set,
                                 .kind = assignment.parts.front().kind,
                                 .report_completion = report_completion});
  if (!end) {
    const std::lock_guard lock(mutex_);
    --on_device_;
  }
  return end;
}

void Executor::device_ended(const DeviceWork& work, std::optional<std::chrono::nanoseconds> took) {
  recorder_.device_ended(work, took);
  const bool aborted = work.plane->gpu.aborted();
  const bool report = work.report_completion && !aborted;
  {
    const std::lock_guard lock(mutex_);
    --on_device_;
    if (aborted) {
      in_trouble(std::make_shared<Error>(ErrorCode::kPeerLost, "work on a GPU was stopped, and has given no result"));
    }
    if (report) {
      completed_.push_back(work.bucket);
      has_completed_.store(true, std::memory_order_release);
    }
    drained_.notify_all();
  }
  completion_.look_again();
  if (report || aborted) after_run_();
}

void Executor::device_failed(const std::shared_ptr<Plane>& plane, const Error& error) {
  {
    const std::lock_guard lock(mutex_);
    in_trouble(explain(error, *plane));
  }
  after_run_();
}

void Executor::in_trouble(std::shared_ptr<const Error> error) {
  if (!trouble_) trouble_ = std::move(error);
  has_trouble_.store(true, std::memory_order_release);
}

void Executor::run(Assignment assignment, bool on_own_thread, const Interruption* by) {
  recorder_.run_begins(assignment);
  std::shared_ptr<const Error> error = assignment.failure ? assignment.failure : run_parts(assignment, by);
  bool report = assignment.report_completion && !error;
  if (assignment.uses_gpu()) {
    const SharedEvent event = follow(assignment, report);
    for (FinishedUnit& unit : assignment.units) unit.result.event = event;
    report = false;  // later
    if (!event && !error) error = std::make_shared<Error>(ErrorCode::kCollective, "CUDA has failed after a launch");
  }
  if (error) {
    {
      const std::lock_guard lock(mutex_);
      in_trouble(error);  // before the abort makes trouble of its own
    }
    // The other members must not wait for this one in vain, nor what they have on their devices.
    assignment.plane->abort();
  }
  recorder_.run_ends(assignment, error.get(), on_own_thread);

  std::vector<FinishedUnit> done;
  std::shared_ptr<const Error> known;
  {
    const std::lock_guard lock(mutex_);
    // Asked under the lock: fail_all() comes after Completion::fail(), so either it finds these units or we find why.
    if (error) known = completion_.failure();
    running_ = false;
    if (!error || known) {
      done = std::move(assignment.units);
    } else {
      for (FinishedUnit& unit : assignment.units) unresolved_.push_back(std::move(unit));
    }
    if (report) {
      completed_.push_back(assignment.bucket);
      has_completed_.store(true, std::memory_order_release);
    }
    runnable_.store(!queue_.empty(), std::memory_order_release);
    if (queue_.empty()) drained_.notify_all();
  }
  for (FinishedUnit& unit : done) {
    if (known) unit.result = {.error = known, .event = std::move(unit.result.event)};
    completion_.complete(std::move(unit.handle), std::move(unit.result));
  }
  completion_.notify();
  after_run_();
}

void Executor::hand_over() {
  {
    const std::lock_guard lock(mutex_);
    if (queue_.empty() || stopping_) return;
    handed_over_ = true;
    if (!thread_.joinable()) {
      try {
        thread_ = start_thread("fw-exec", [this] { thread_main(); });
      } catch (const std::system_error&) {
        handed_over_ = false;  // no thread to be had: better late than never
      }
    }
  }
  if (thread_.joinable()) {
    wake_.notify_one();
  } else {
    run_one();
  }
}

void Executor::thread_main() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || (handed_over_ && !running_ && !queue_.empty()); });
    if (stopping_) return;
    handed_over_ = false;  // before looking: what is handed over from here on is not lost
    lock.unlock();
    while (run_one_if(kAnySize, true, nullptr)) {
    }
    lock.lock();
  }
}

bool Executor::busy() const {
  const std::lock_guard lock(mutex_);
  return running_ || !queue_.empty() || !unresolved_.empty() || on_device_ > 0;
}

std::vector<uint64_t> Executor::take_completed() {
  std::vector<uint64_t> out;
  if (!has_completed()) return out;
  const std::lock_guard lock(mutex_);
  out.swap(completed_);
  has_completed_.store(false, std::memory_order_release);
  return out;
}

std::shared_ptr<const Error> Executor::trouble() const {
  if (!has_trouble()) return nullptr;
  const std::lock_guard lock(mutex_);
  return trouble_;
}

void Executor::fail_all(const std::shared_ptr<const Error>& error, int rank) {
  std::vector<FinishedUnit> failed;
  {
    const std::lock_guard lock(mutex_);
    failed.swap(unresolved_);
    std::erase_if(queue_, [&](Assignment& assignment) {
      if (rank != kAnyRank && !assignment.plane->contains(rank)) return false;
      for (FinishedUnit& unit : assignment.units) {
        recorder_.dropped(unit.trace, *error);
        failed.push_back(std::move(unit));
      }
      return true;
    });
    runnable_.store(!running_ && !queue_.empty(), std::memory_order_release);
    if (!running_ && queue_.empty()) drained_.notify_all();
  }
  for (FinishedUnit& unit : failed) {
    completion_.complete(std::move(unit.handle), {.error = error, .event = std::move(unit.result.event)});
  }
  completion_.notify();
}

void Executor::wait_until_drained(std::chrono::nanoseconds at_most) {
  std::unique_lock lock(mutex_);
  drained_.wait_for(lock, at_most, [this] { return !running_ && queue_.empty() && on_device_ == 0; });
}

bool Executor::wait_for_device(std::chrono::nanoseconds at_most) {
  std::unique_lock lock(mutex_);
  return drained_.wait_for(lock, at_most, [this] { return on_device_ == 0; });
}

}  // namespace fusewire
