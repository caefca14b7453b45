// The inside of an Engine.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "common/config.h"
#include "common/futex.h"
#include "common/logging.h"
#include "engine/activity.h"
#include "engine/completion.h"
#include "engine/engine.h"
#include "engine/executor.h"
#include "engine/gpu_launcher.h"
#include "engine/interruption.h"
#include "engine/plane_table.h"
#include "engine/progress.h"
#include "engine/recorder.h"
#include "transport/endpoint.h"

namespace fusewire {

// fork() calls as seen from the child: an engine born under another count belongs to the parent.
uint32_t count_forks();

// engine.cc: its life, from the threads that submit and shut down. engine_drive.cc: who drives it.
class Engine::Impl {
 public:
  Impl(std::unique_ptr<Endpoint> endpoint, const Config& config, GpuOpener open_gpu);
  ~Impl() { shutdown(true, "its engine was destroyed"); }

  Handle submit(Submission submission, bool wake);
  void wait(const HandleState& handle, const std::function<void()>& on_signal);
  void shutdown(bool clean, const std::string& reason);

  bool has_work() const { return progress_.has_work() || executor_.has_runnable(); }
  bool forked() const { return count_forks() != born_at_fork_; }
  void check_usable() const;

  const Config config_;
  const std::unique_ptr<Endpoint> endpoint_;
  const Logger logger_;
  const std::chrono::microseconds spin_;
  Seat& seat_;
  Completion completion_;
  Recorder recorder_;
  GpuLauncher gpu_;
  Executor executor_;
  PlaneTable planes_;
  Progress progress_;
  ActivityProbe activity_;

 private:
  void coordinate();
  void drive(const HandleState& handle, const std::function<void()>& on_signal);
  bool run_inline(const Interruption& interruption);
  bool spin(const HandleState& handle);
  void leave_seat();
  std::optional<std::chrono::nanoseconds> look_in();
  void on_departure(const Departure& departure);

  const uint32_t born_at_fork_ = count_forks();
  // When the sleeping coordinator thread will look at the stall times by itself, in steady-clock nanoseconds. A caller
  // that leaves the seat with an earlier deadline pending wakes it, so that somebody watches the clock.
  static constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
  std::atomic<int64_t> armed_until_{kNever};
  // Note [Lent progress]
  // A driver that runs a bucket has no use for progress_ meanwhile, but rank 0's has to report stalls, and the bucket
  // may be what stalls. So it offers progress_ for that time; the coordinator thread, which wakes by itself when stall
  // times may be over, borrows it, and the driver, when its bucket has ended, waits until it is back.
  enum : uint32_t { kOwned, kOffered, kBorrowed };
  class Loan {
   public:
    explicit Loan(std::atomic<uint32_t>& state) : state_(state) { state_.store(kOffered, std::memory_order_release); }
    ~Loan() {
      for (uint32_t state = kOffered; !state_.compare_exchange_strong(state, kOwned, std::memory_order_acquire);) {
        if (state == kBorrowed) futex_wait(state_, kBorrowed);
        state = kOffered;
      }
    }
    Loan(const Loan&) = delete;
    Loan& operator=(const Loan&) = delete;

   private:
    std::atomic<uint32_t>& state_;
  };
  std::atomic<uint32_t> loan_{kOwned};
  // How often the coordinator thread of rank 0 looks whether something has stalled while callers drive; none: never.
  const std::optional<std::chrono::nanoseconds> watched_every_;
  std::atomic<bool> closing_{false};
  std::atomic<bool> closed_{false};
  std::mutex shutdown_mutex_;  // held for all of shutdown(); taken before every other lock
  std::thread coordinator_thread_;
};

}  // namespace fusewire
