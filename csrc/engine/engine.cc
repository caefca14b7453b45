#include "engine/engine.h"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "common/thread.h"
#include "engine/engine_impl.h"
#include "engine/submission.h"

namespace fusewire {
namespace {

// Cores that this host's ranks have together. mpirun and others bind each rank to cores of its own, so what all may use
// is what their launcher, the parent process, may.
int ranks_cores() {
  int most = 0;
  for (const pid_t process : {pid_t{0}, getppid()}) {
    cpu_set_t cores;
    if (sched_getaffinity(process, sizeof(cores), &cores) == 0) most = std::max(most, CPU_COUNT(&cores));
  }
  return most > 0 ? most : static_cast<int>(std::thread::hardware_concurrency());
}

// A spinning thread only helps while its peer runs at the same time.
std::chrono::microseconds spin_time(const Config& config, int local_ranks) {
  if (config.spin_us >= 0) return std::chrono::microseconds(config.spin_us);
  return std::chrono::microseconds(ranks_cores() >= local_ranks ? 20 : 0);
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

// Both may own Python objects: Note [Who drops a keep-alive].
struct KeptAlive {
  KeptAlive(std::shared_ptr<void> owned, Allocator made_by) : owner(std::move(owned)), allocate(std::move(made_by)) {}
  const std::shared_ptr<void> owner;
  const Allocator allocate;
};

// How long shutdown() lets buckets that have begun come to their end.
constexpr std::chrono::seconds kDrainTime{5};

}  // namespace

uint32_t count_forks() {
  static std::atomic<uint32_t> count{0};
  [[maybe_unused]] static const int registered =
      pthread_atfork(nullptr, nullptr, [] { count.fetch_add(1, std::memory_order_relaxed); });
  return count.load(std::memory_order_relaxed);
}

Engine::Impl::Impl(std::unique_ptr<Endpoint> endpoint, const Config& config, GpuOpener open_gpu)
    : config_(config),
      endpoint_(std::move(endpoint)),
      logger_(config.log_level, endpoint_->rank()),
      spin_(spin_time(config, endpoint_->size())),
      seat_(endpoint_->seat()),
      recorder_(endpoint_->rank(), endpoint_->size()),
      gpu_(endpoint_->rank(), std::move(open_gpu),
           {.kind = config_.gpu_backend,
            .abort_after = to_duration(config_.stall_abort_seconds),
            .nccl_shares_gpus = config_.nccl_shares_gpus},
           {[this](const DeviceWork& work, auto took) { executor_.device_ended(work, took); },
            [this](const auto& plane, const Error& error) { executor_.device_failed(plane, error); }}),
      executor_(completion_, recorder_, gpu_, [this] { seat_.ring(); }),
      planes_(*endpoint_,
              make_plane_source(DeviceType::kCpu, {*endpoint_, config_, logger_, plane_options(config, spin_)})),
      progress_(*endpoint_, config_, logger_, completion_, executor_, planes_, recorder_),
      activity_([this](std::string text) {
        progress_.tell_activity(std::move(text));
        seat_.ring();
      }),
      watched_every_(endpoint_->rank() == 0 ? stall_interval(config_) : std::nullopt) {
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
    } else if (clean) {
      executor_.wait_for_device(kDrainTime);  // what the failure did not concern
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
  const bool ended = executor_.wait_for_device(kDrainTime);
  gpu_.stop();
  if (!ended) {
    logger_.warning("a GPU has not ended what it was given for a collective, not even after that was aborted");
    completion_.leak_retired();
  }
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
  if (!handle->event()) handle->drop_keep_alive();  // else drop_retired() does it when it may
  impl_->completion_.drop_retired();
  if (!handle->ok()) throw *handle->error();
}

void Engine::wait_all(const std::vector<Handle>& handles, const std::function<void()>& on_signal) {
  std::shared_ptr<const Error> first;
  for (const Handle& handle : handles) {
    if (!handle->done()) impl_->wait(*handle, on_signal);
    if (!handle->event()) handle->drop_keep_alive();
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
