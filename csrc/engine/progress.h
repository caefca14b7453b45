// One rank's protocol loop without a thread of its own: whoever holds the driver's seat calls step(). It carries
// submissions to the control plane, messages between ranks, and answers to the executor.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "common/config.h"
#include "common/logging.h"
#include "control/coordinator.h"
#include "control/participant.h"
#include "engine/completion.h"
#include "engine/executor.h"
#include "engine/in_flight.h"
#include "engine/plane_table.h"
#include "engine/recorder.h"
#include "transport/endpoint.h"

namespace fusewire {

// Thread safety: step(), time_to_deadline() and close() belong to the driver; the rest may be called by anybody.
// Lock order: inbox_mutex_ is a leaf.
class Progress {
 public:
  Progress(Endpoint& endpoint, const Config& config, const Logger& logger, Completion& completion, Executor& executor,
           PlaneTable& planes, Recorder& recorder);

  void add(UnitSpec spec, std::vector<int64_t> extents, InFlight unit);
  void departed(const Departure& departure);
  void tell_activity(std::string text);  // what the root has asked for through `on_probe`

  // Is called, on the driver's thread, when the root asks what this rank does. Set it before anything happens.
  void on_probe(std::function<void()> callback) { on_probe_ = std::move(callback); }

  bool step();            // true: something was done, look again
  bool has_work() const;  // cheap, for the moment before a sleep
  std::optional<std::chrono::nanoseconds> time_to_deadline();
  void close(const std::shared_ptr<const Error>& error);  // fails everything with `error`

  CacheCounts cache_counts() const { return participant_.cache_counts(); }
  size_t pending() const { return pending_.load(std::memory_order_relaxed); }
  // Whether somebody still needs this rank: it has announced units that others count on, or has yet to end its part of
  // buckets that all have started.
  bool needed() const { return pending() > 0 || executor_.busy(); }

 private:
  using Clock = std::chrono::steady_clock;
  using SharedError = std::shared_ptr<const Error>;
  struct Submitted {
    UnitSpec spec;
    std::vector<int64_t> extents;
    InFlight unit;
  };

  bool try_step(Clock::time_point now);
  bool take_submissions(Clock::time_point now);
  void take(Submitted& submitted, Clock::time_point now);
  bool take_departures(Clock::time_point now);
  bool take_completions();
  bool take_activity();
  bool lead(Clock::time_point now);  // rank 0 with its Coordinator
  bool follow();                     // everybody else
  void apply(const ResponseList& response);
  void dispatch(Work& work);
  void complete(Work& work, std::vector<InFlight>& units);
  void check_time(Clock::time_point now);
  void check_trouble(Clock::time_point now);
  void report(const Error& failure, Clock::time_point now);
  bool has_new_trouble() const;
  std::optional<Clock::time_point> deadline();
  SharedError internal_error(const std::exception& cause) const;
  void fail(const SharedError& error);
  void fail_unit(InFlight unit, const SharedError& error);
  void fail_pending(const SharedError& error);

  Endpoint& endpoint_;
  const Config& config_;
  const Logger& logger_;
  Completion& completion_;
  Executor& executor_;
  PlaneTable& planes_;
  Recorder& recorder_;

  Participant participant_;
  std::unique_ptr<Coordinator> coordinator_;
  InFlightTable units_;
  std::function<void()> on_probe_;
  std::vector<std::byte> frame_;
  Clock::time_point now_{};  // of the step in progress
  std::optional<Departure> root_left_;
  std::optional<Clock::time_point> trouble_since_;
  std::atomic<bool> trouble_seen_{false};         // trouble_since_ is set
  std::optional<Clock::time_point> join_active_;  // while a join is in flight here: when something last happened to it

  std::mutex inbox_mutex_;
  std::vector<Submitted> submissions_;
  std::vector<Departure> departures_;
  std::optional<std::string> activity_;
  std::atomic<bool> has_submissions_{false};
  std::atomic<bool> has_departures_{false};
  std::atomic<bool> has_activity_{false};
  std::atomic<size_t> pending_{0};
};

}  // namespace fusewire
