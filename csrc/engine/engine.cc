#include "engine/engine.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "common/futex.h"
#include "common/logging.h"
#include "engine/activity.h"
#include "engine/completion.h"
#include "engine/executor.h"
#include "engine/gpu_launcher.h"
#include "engine/interruption.h"
#include "engine/plane_table.h"
#include "engine/progress.h"
#include "engine/recorder.h"
#include "engine/submission.h"
#include "engine/thread.h"

namespace fusewire {
namespace {

using Clock = std::chrono::steady_clock;

// Counts fork() calls as seen from the child: an engine born under another count belongs to the parent.
std::atomic<uint32_t> fork_count{0};

uint32_t watch_forks() {
  [[maybe_unused]] static const int registered =
      pthread_atfork(nullptr, nullptr, [] { fork_count.fetch_add(1, std::memory_order_relaxed); });
  return fork_count.load(std::memory_order_relaxed);
}

int online_cores() {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) == 0) return CPU_COUNT(&cores);
  return static_cast<int>(std::thread::hardware_concurrency());
}

// A spinning thread only helps while its peer runs at the same time.
std::chrono::microseconds spin_time(const Config& config, int local_ranks) {
  if (config.spin_us >= 0) return std::chrono::microseconds(config.spin_us);
  return std::chrono::microseconds(online_cores() >= local_ranks ? 20 : 0);
}

std::chrono::nanoseconds to_duration(double seconds) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds));
}

ShmOptions plane_options(const Config& config, std::chrono::microseconds spin) {
  ShmOptions options;
  options.chunk_bytes = config.shm_chunk;
  options.spin = spin;
  options.abort_after = to_duration(config.stall_abort_seconds);
  return options;
}

// The shorter of the stall times that are not off.
std::optional<std::chrono::nanoseconds> stall_interval(const Config& config) {
  double shortest = std::numeric_limits<double>::infinity();
  for (const double seconds : {config.stall_check_seconds, config.stall_abort_seconds}) {
    if (seconds > 0) shortest = std::min(shortest, seconds);
  }
  if (shortest > 1e9) return std::nullopt;
  return to_duration(shortest);
}

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

int64_t nanoseconds_at(std::optional<std::chrono::nanoseconds> from_now) {
  if (!from_now) return kNever;
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count() +
         from_now->count();
}

// Both may own Python objects: Note [Who drops a keep-alive].
struct KeptAlive {
  KeptAlive(std::shared_ptr<void> owned, Allocator made_by) : owner(std::move(owned)), allocate(std::move(made_by)) {}
  const std::shared_ptr<void> owner;
  const Allocator allocate;
};

// How long shutdown() lets buckets that have begun come to their end.
constexpr std::chrono::seconds kDrainTime{5};

}  // namespace

class Engine::Impl {
 public:
  Impl(std::unique_ptr<Endpoint> endpoint, const Config& config, GpuOpener open_gpu)
      : config_(config),
        endpoint_(std::move(endpoint)),
        logger_(config.log_level, endpoint_->rank()),
        spin_(spin_time(config, endpoint_->size())),
        seat_(endpoint_->seat()),
        recorder_(endpoint_->rank(), endpoint_->size()),
        gpu_(endpoint_->rank(), std::move(open_gpu),
             {.kind = config_.gpu_backend, .abort_after = to_duration(config_.stall_abort_seconds)}),
        executor_(completion_, recorder_, gpu_, [this] { seat_.ring(); }),
        planes_(*endpoint_,
                make_plane_source(DeviceType::kCpu, {*endpoint_, config_, logger_, plane_options(config, spin_)})),
        progress_(*endpoint_, config_, logger_, completion_, executor_, planes_, recorder_),
        activity_([this](std::string text) {
          progress_.tell_activity(std::move(text));
          seat_.ring();
        }) {
    progress_.on_probe([this] { activity_.ask(); });
    if (!config_.timeline.empty()) {
      recorder_.timeline().start(config_.timeline, config_.timeline_mark_cycles, config_.timeline_limit);
    }
    std::vector<int32_t> everybody(static_cast<size_t>(endpoint_->size()));
    for (size_t i = 0; i < everybody.size(); ++i) everybody[i] = static_cast<int32_t>(i);
    planes_.add(0, std::move(everybody));
    endpoint_->watch([this](const Departure& departure) { on_departure(departure); });
    coordinator_thread_ = start_thread("fw-coord", [this] { coordinate(); });
  }

  ~Impl() { shutdown(true, "its engine was destroyed"); }

  Handle submit(Submission submission, bool wake);
  void wait(const HandleState& handle, const std::function<void()>& on_signal);
  void shutdown(bool clean, const std::string& reason);

  bool has_work() const { return progress_.has_work() || executor_.has_runnable(); }
  bool forked() const { return fork_count.load(std::memory_order_relaxed) != born_at_fork_; }
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

  const uint32_t born_at_fork_ = watch_forks();
  // When the sleeping coordinator thread will look at the stall times by itself, in steady-clock nanoseconds. A caller
  // that leaves the seat with an earlier deadline pending wakes it, so that somebody watches the clock.
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
  const std::optional<std::chrono::nanoseconds> watched_every_ =
      endpoint_->rank() == 0 ? stall_interval(config_) : std::nullopt;
  std::atomic<bool> closing_{false};
  std::atomic<bool> closed_{false};
  std::mutex shutdown_mutex_;  // held for all of shutdown(); taken before every other lock
  std::thread coordinator_thread_;
};

void Engine::Impl::check_usable() const {
  if (forked()) {
    throw Error(ErrorCode::kShutdown,
                "this process was forked from one that uses Fusewire and cannot take part in its collectives; start "
                "ranks as processes of their own (torchrun, fusewire run)");
  }
  if (const auto failure = completion_.failure()) throw *failure;
}

Handle Engine::Impl::submit(Submission submission, bool wake) {
  check_usable();
  completion_.drop_retired();
  for (const SubmittedTensor& tensor : submission.tensors) {
    if (tensor.input.device.type == DeviceType::kCuda) [[unlikely]]
      gpu_.claim(tensor.input.device);
  }

  UnitSpec spec = describe(submission);
  InFlight unit;
  static_cast<Operation&>(unit) = spec;
  unit.process_set = spec.process_set;
  unit.tensors = std::move(submission.tensors);
  unit.handle = std::make_shared<HandleState>();
  if (submission.allocate) {
    auto kept = std::make_shared<KeptAlive>(std::move(submission.keep_alive), std::move(submission.allocate));
    unit.allocate = &kept->allocate;
    submission.keep_alive = std::move(kept);
  }
  unit.handle->set_keep_alive(std::move(submission.keep_alive));
  unit.trace = {recorder_.submitted(spec), submission.observer};
  Handle handle = unit.handle;
  progress_.add(std::move(spec), std::move(submission.extents), std::move(unit));
  if (wake) seat_.ring();
  if (closed_.load(std::memory_order_seq_cst) && seat_.take_as_caller()) {
    progress_.close(completion_.failure());  // shutdown() came in between and has not seen it
    seat_.leave();
  }
  return handle;
}

void Engine::Impl::wait(const HandleState& handle, const std::function<void()>& on_signal) {
  while (!handle.done()) {
    if (forked()) check_usable();
    if (seat_.take_as_caller()) {
      drive(handle, on_signal);
      continue;
    }
    // Somebody else drives. The coordinator thread gives way when it sees a waiter; another caller finishes its own
    // wait first, and completes ours on the way or leaves the seat. It may sleep, and not know of our submission yet.
    const Completion::Ticket ticket = completion_.begin_wait();
    seat_.ring();
    bool interrupted = false;
    if (!handle.done() && seat_.state() != SeatState::kIdle && seat_.state() != SeatState::kWoken) {
      interrupted = completion_.sleep(ticket);
    }
    completion_.end_wait();
    // The driver may have left the seat to us although we do not need it any more: then the work is still there.
    if ((interrupted || handle.done()) && has_work()) seat_.ring();
    if (interrupted && on_signal) on_signal();
  }
}

// Holds the seat until the handle is done.
void Engine::Impl::drive(const HandleState& handle, const std::function<void()>& on_signal) {
  bool interrupted = false;
  const Interruption inside(on_signal, endpoint_->rank());  // of a bucket
  while (!handle.done() && !interrupted && !inside.error()) {
    if (closed_.load(std::memory_order_seq_cst)) {
      progress_.close(completion_.failure());  // submitted while shutdown() was at work
      break;
    }
    if (closing_.load(std::memory_order_seq_cst)) break;
    bool worked = progress_.step();
    worked |= run_inline(inside);
    if (worked || handle.done() || spin(handle)) continue;

    const auto timeout = progress_.time_to_deadline();
    const uint32_t ticket = seat_.announce_sleep();
    if (handle.done() || has_work() || closing_.load(std::memory_order_seq_cst)) {
      seat_.cancel_sleep();
      continue;
    }
    interrupted = seat_.sleep(ticket, timeout);
  }
  leave_seat();
  if (inside.error()) inside.rethrow();
  if (interrupted && on_signal) on_signal();
  if (closing_.load(std::memory_order_seq_cst) && !handle.done()) {
    // shutdown() fails every handle as soon as it has the seat.
    const Completion::Ticket ticket = completion_.begin_wait();
    if (!handle.done()) completion_.sleep(ticket);
    completion_.end_wait();
  }
}

// Note [Inline buckets]. A driver that runs a bucket sends nothing meanwhile, so it must not run one while a peer may
// still lack the rest of the very response that starts it: then the executor thread does.
bool Engine::Impl::run_inline(const Interruption& interruption) {
  if (!executor_.has_runnable()) return false;
  if (!endpoint_->has_unsent()) {
    if (watched_every_ && armed_until_.load(std::memory_order_relaxed) == kNever) {
      armed_until_.store(0, std::memory_order_seq_cst);
      seat_.alarm();
    }
    const Loan loan(loan_);
    return executor_.run_one(&interruption);
  }
  executor_.hand_over();
  return false;
}

// Looks for work for a short while; true when there is some.
bool Engine::Impl::spin(const HandleState& handle) {
  if (spin_.count() == 0) return false;
  const auto until = Clock::now() + spin_;
  do {
    for (int i = 0; i < 32; ++i) {
      if (has_work() || handle.done()) return true;
      cpu_relax();
    }
  } while (Clock::now() < until);
  return false;
}

void Engine::Impl::leave_seat() {
  // The last bucket's completion is passed on here, so that a synchronous call need not wake the coordinator thread.
  if (!closing_.load(std::memory_order_seq_cst)) progress_.step();
  const int64_t deadline = nanoseconds_at(progress_.time_to_deadline());
  seat_.leave();
  completion_.notify();
  if (has_work() || deadline < armed_until_.load(std::memory_order_seq_cst)) seat_.ring();
}

void Engine::Impl::coordinate() {
  while (!closed_.load(std::memory_order_seq_cst)) {
    const uint32_t ticket = seat_.ticket();
    std::optional<std::chrono::nanoseconds> timeout;
    armed_until_.store(kNever, std::memory_order_seq_cst);
    if (!closing_.load(std::memory_order_seq_cst) && seat_.take_as_coordinator()) {
      // Note [Inline buckets]
      while (!completion_.has_waiters() && !closing_.load(std::memory_order_seq_cst) &&
             (progress_.step() || (!endpoint_->has_unsent() && executor_.run_one_if(config_.inline_limit)))) {
      }
      executor_.hand_over();
      timeout = progress_.time_to_deadline();
      armed_until_.store(nanoseconds_at(timeout), std::memory_order_seq_cst);
      seat_.leave();
      completion_.notify();
      if (!completion_.has_waiters() && progress_.has_work()) continue;
    } else if (watched_every_ && !closing_.load(std::memory_order_seq_cst)) {
      timeout = look_in();
      armed_until_.store(nanoseconds_at(timeout), std::memory_order_seq_cst);
    }
    if (closed_.load(std::memory_order_seq_cst)) break;
    seat_.sleep_as_coordinator(ticket, timeout);
  }
}

// See Note [Lent progress]. Returns how long to sleep.
std::optional<std::chrono::nanoseconds> Engine::Impl::look_in() {
  std::chrono::nanoseconds sleep = *watched_every_;
  uint32_t state = kOffered;
  if (!loan_.compare_exchange_strong(state, kBorrowed, std::memory_order_acquire)) return sleep;
  while (progress_.step()) {
  }
  if (const auto due = progress_.time_to_deadline()) sleep = std::min(sleep, *due);
  loan_.store(kOffered, std::memory_order_release);
  futex_wake(loan_, 1);
  return sleep;
}

void Engine::Impl::on_departure(const Departure& departure) {
  // A bucket that runs may be waiting for memory that nobody will write any more. If nothing runs, nobody is disturbed.
  // The driver is told first: either it knows before it starts the next bucket, or that bucket is seen here.
  progress_.departed(departure);
  if (!departure.clean && executor_.busy()) planes_.abort(departure.rank);
  seat_.ring();
}

void Engine::Impl::shutdown(bool clean, const std::string& reason) {
  if (forked()) return;
  const std::lock_guard lock(shutdown_mutex_);
  if (closed_.load(std::memory_order_seq_cst)) return;
  // What all ranks have started the others will finish; let it end here too, or they would wait for this rank.
  // What does not must not keep them waiting.
  const auto finish_or_abandon = [&] {
    if (clean && !completion_.failed()) {
      executor_.hand_over();
      executor_.wait_until_drained(kDrainTime);
    }
    if (!executor_.busy()) return;
    clean = false;
    planes_.abort(PlaneTable::kEverySet);
  };
  finish_or_abandon();

  closing_.store(true, std::memory_order_seq_cst);
  const auto error = std::make_shared<Error>(
      ErrorCode::kShutdown, "Fusewire was shut down while this operation was pending, or before it was called");
  while (!seat_.take_as_caller()) {
    const Completion::Ticket ticket = completion_.begin_wait();
    seat_.ring();  // a caller that sleeps in the seat looks at closing_
    if (seat_.state() != SeatState::kIdle && seat_.state() != SeatState::kWoken) completion_.sleep(ticket);
    completion_.end_wait();
  }
  finish_or_abandon();  // answers that came until the seat was ours
  // A clean goodbye promises that nobody waits for this rank. What it has announced may have been answered by now, and
  // then the others are about to run it.
  const bool needed = progress_.needed();
  progress_.close(error);
  completion_.notify();
  endpoint_->goodbye(clean && !needed, needed ? reason + " (while operations were pending)" : reason);
  closed_.store(true, std::memory_order_seq_cst);
  seat_.leave();
  seat_.alarm();  // another thread may have the seat by now; the coordinator thread must wake all the same
  completion_.notify();
  coordinator_thread_.join();
  executor_.stop();
  activity_.stop();
  recorder_.timeline().stop();
  completion_.drop_retired();
}

Engine::Engine(std::unique_ptr<Endpoint> endpoint, const Config& config, GpuOpener open_gpu)
    : impl_(std::make_unique<Impl>(std::move(endpoint), config, std::move(open_gpu))) {}

Engine::~Engine() {
  // In a forked child the threads to join do not exist and the peers must notice nothing.
  if (impl_ && impl_->forked()) static_cast<void>(impl_.release());
}

int Engine::rank() const { return impl_->endpoint_->rank(); }
int Engine::size() const { return impl_->endpoint_->size(); }

Handle Engine::submit(Submission submission, bool wake) { return impl_->submit(std::move(submission), wake); }

void Engine::wait(const Handle& handle, const std::function<void()>& on_signal) {
  if (!handle->done()) impl_->wait(*handle, on_signal);
  handle->drop_keep_alive();
  impl_->completion_.drop_retired();
  if (!handle->ok()) throw *handle->error();
}

void Engine::wait_all(const std::vector<Handle>& handles, const std::function<void()>& on_signal) {
  std::shared_ptr<const Error> first;
  for (const Handle& handle : handles) {
    if (!handle->done()) impl_->wait(*handle, on_signal);
    handle->drop_keep_alive();
    if (!handle->ok() && !first) first = handle->error();
  }
  impl_->completion_.drop_retired();
  if (first) throw *first;
}

bool Engine::poll(const Handle& handle) { return handle->done(); }

void Engine::shutdown(bool clean, const std::string& reason) { impl_->shutdown(clean, reason); }

std::shared_ptr<const Error> Engine::failure() const { return impl_->completion_.failure(); }

std::string Engine::data_plane() const { return std::string(impl_->planes_.name()); }

std::string Engine::gpu_data_plane(std::string* reason) const {
  const std::shared_ptr<Plane> all = impl_->planes_.plane(0);
  const Backend* const plane = all->gpu.get();
  if (plane == nullptr) return "";
  if (reason != nullptr) *reason = all->gpu.why();
  return std::string(plane->name());
}

std::vector<int32_t> Engine::members(uint32_t process_set) const { return impl_->planes_.members(process_set); }

EngineStats Engine::stats() const {
  EngineStats stats = impl_->recorder_.counters().snapshot();
  stats.cache = impl_->progress_.cache_counts();
  return stats;
}

void Engine::start_timeline(const std::string& path, bool mark_cycles) {
  impl_->check_usable();
  impl_->recorder_.timeline().start(path, mark_cycles, impl_->config_.timeline_limit);
}

void Engine::stop_timeline() {
  if (!impl_->forked()) impl_->recorder_.timeline().stop();
}

size_t Engine::pending() const { return impl_->progress_.pending(); }

void Engine::set_activity_source(std::function<std::string()> source) {
  impl_->activity_.set_source(std::move(source));
}

void Engine::abandon_after_fork() noexcept {
  impl_->recorder_.timeline().abandon_after_fork();
  impl_->endpoint_->abandon_after_fork();
}

}  // namespace fusewire
