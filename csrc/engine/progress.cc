#include "engine/progress.h"

#include <algorithm>
#include <utility>

#include "control/wire.h"
#include "engine/assignment.h"
#include "engine/submission.h"

namespace fusewire {
namespace {

// How much later than the root a follower gives up, so that the root's report, which knows who is late, comes first;
// and how long a data plane's failure waits for the root's word on whose fault it is.
constexpr std::chrono::milliseconds kGrace{500};
constexpr std::chrono::milliseconds kTroublePatience{1500};

std::chrono::nanoseconds to_duration(double seconds) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::duration<double>(seconds));
}

}  // namespace

Progress::Progress(Endpoint& endpoint, const Config& config, const Logger& logger, Completion& completion,
                   Executor& executor, PlaneTable& planes, Recorder& recorder)
    : endpoint_(endpoint),
      config_(config),
      logger_(logger),
      completion_(completion),
      executor_(executor),
      planes_(planes),
      recorder_(recorder),
      participant_(endpoint.rank(), endpoint.size()) {
  if (endpoint.rank() != 0) return;
  coordinator_ = std::make_unique<Coordinator>(endpoint.size(), config);
  coordinator_->on_announced(
      [this](int rank, uint32_t set, const std::string& name) { recorder_.announced(rank, set, name); });
}

void Progress::add(UnitSpec spec, std::vector<int64_t> extents, InFlight unit) {
  pending_.fetch_add(1, std::memory_order_relaxed);
  const std::lock_guard lock(inbox_mutex_);
  submissions_.push_back({std::move(spec), std::move(extents), std::move(unit)});
  has_submissions_.store(true, std::memory_order_seq_cst);
}

void Progress::departed(const Departure& departure) {
  const std::lock_guard lock(inbox_mutex_);
  departures_.push_back(departure);
  has_departures_.store(true, std::memory_order_seq_cst);
}

void Progress::tell_activity(std::string text) {
  const std::lock_guard lock(inbox_mutex_);
  activity_ = std::move(text);
  has_activity_.store(true, std::memory_order_seq_cst);
}

bool Progress::has_work() const {
  return has_submissions_.load(std::memory_order_seq_cst) || has_departures_.load(std::memory_order_seq_cst) ||
         executor_.has_completed() || has_activity_.load(std::memory_order_seq_cst) || has_new_trouble() ||
         endpoint_.has_incoming();
}

bool Progress::step() {
  try {
    return try_step(Clock::now());
  } catch (const std::exception& e) {
    // A malformed message, memory that could not be mapped, ...: this rank cannot go on, and says so.
    const SharedError error = internal_error(e);
    if (!completion_.failed()) {  // goes out with the next step
      participant_.report_failure({0, "", error->code(), error->rank(), error->what()});
    }
    fail(error);
    for (InFlight& unit : units_.take_all()) fail_unit(std::move(unit), completion_.failure());
    return true;
  }
}

Progress::SharedError Progress::internal_error(const std::exception& cause) const {
  return std::make_shared<Error>(
      ErrorCode::kInternal, "rank " + std::to_string(endpoint_.rank()) + " failed inside Fusewire: " + cause.what(),
      endpoint_.rank());
}

bool Progress::try_step(Clock::time_point now) {
  now_ = now;
  bool worked = take_submissions(now);
  worked |= take_completions();
  worked |= take_activity();
  worked |= coordinator_ ? lead(now) : follow();
  worked |= take_departures(now);
  check_trouble(now);
  if (worked) {
    recorder_.cycle(now);
  } else {
    check_time(now);
  }
  return worked;
}

bool Progress::take_submissions(Clock::time_point now) {
  if (!has_submissions_.load(std::memory_order_seq_cst)) return false;
  std::vector<Submitted> taken;
  {
    const std::lock_guard lock(inbox_mutex_);
    taken.swap(submissions_);
    has_submissions_.store(false, std::memory_order_seq_cst);
  }
  for (auto next = taken.begin(); next != taken.end(); ++next) {
    try {
      take(*next, now);
    } catch (const std::exception& cause) {
      // step() fails what is in units_; of the rest nobody else knows.
      const SharedError error = internal_error(cause);
      for (; next != taken.end(); ++next) {
        if (next->unit.handle) fail_unit(std::move(next->unit), error);
      }
      throw;
    }
  }
  return true;
}

void Progress::take(Submitted& submitted, Clock::time_point now) {
  if (const SharedError failure = completion_.failure()) return fail_unit(std::move(submitted.unit), failure);
  std::vector<bool> absent;
  const std::vector<SubmittedTensor>& tensors = submitted.unit.tensors;
  if (std::any_of(tensors.begin(), tensors.end(), [](const SubmittedTensor& t) { return t.absent; })) {
    absent.reserve(tensors.size());
    for (const SubmittedTensor& tensor : tensors) absent.push_back(tensor.absent);
  }
  const UnitToken token = units_.add(std::move(submitted.unit), now);
  try {
    participant_.submit(submitted.spec, std::move(absent), token, std::move(submitted.extents));
    if (submitted.spec.kind == OpKind::kJoin) join_active_ = now;
  } catch (const Error& error) {
    fail_unit(units_.take(token), std::make_shared<Error>(error));
  }
}

bool Progress::take_completions() {
  if (!executor_.has_completed()) return false;
  for (const uint64_t bucket : executor_.take_completed()) participant_.completed(bucket);
  return true;
}

bool Progress::take_activity() {
  if (!has_activity_.load(std::memory_order_seq_cst)) return false;
  const std::lock_guard lock(inbox_mutex_);
  has_activity_.store(false, std::memory_order_seq_cst);
  participant_.tell_activity(std::exchange(activity_, std::nullopt).value_or(""));
  return true;
}

bool Progress::lead(Clock::time_point now) {
  bool worked = false;
  for (int peer = 1; peer < endpoint_.size(); ++peer) {
    while (endpoint_.receive(peer, frame_)) {
      worked = true;
      coordinator_->receive(peer, decode_requests(frame_), now);
    }
  }
  for (;;) {
    if (participant_.has_outgoing()) coordinator_->receive(0, participant_.take_outgoing(), now);
    const std::optional<ResponseList> response = coordinator_->poll(now);
    if (!response) break;
    worked = true;
    const std::vector<std::byte> bytes = encode(*response);
    for (int peer = 1; peer < endpoint_.size(); ++peer) endpoint_.send(peer, bytes);
    apply(*response);
  }
  endpoint_.flush();
  return worked;
}

bool Progress::follow() {
  bool worked = false;
  while (endpoint_.receive(0, frame_)) {
    worked = true;
    apply(decode_responses(frame_));
  }
  if (participant_.has_outgoing()) {
    worked = true;
    endpoint_.send(0, encode(participant_.take_outgoing()));
  }
  endpoint_.flush();
  if (root_left_ && needed()) {
    const std::string who = "rank 0 has left the job: " + root_left_->reason +
                            ". Look at rank 0's own output for the cause, then restart the job.";
    const auto error = std::make_shared<Error>(ErrorCode::kPeerLost, who, 0);
    if (root_left_->clean && !executor_.has_trouble()) {
      // What rank 0 had started it has finished, so buckets that run here will end well; only what it has not answered
      // never will be.
      completion_.fail(error);
      fail_pending(error);
    } else {
      fail(error);
    }
  }
  return worked;
}

bool Progress::take_departures(Clock::time_point now) {
  if (!has_departures_.load(std::memory_order_seq_cst)) return false;
  std::vector<Departure> taken;
  {
    const std::lock_guard lock(inbox_mutex_);
    taken.swap(departures_);
    has_departures_.store(false, std::memory_order_seq_cst);
  }
  // What a rank had said before it left counts, so it is read first; follow() does the same for rank 0's last words.
  if (coordinator_) lead(now);
  for (const Departure& departure : taken) {
    if (coordinator_) {
      coordinator_->leave(departure.rank, departure.clean, departure.reason, now);
    } else {
      root_left_ = departure;
    }
  }
  // What follows from it comes before the next bucket: the driver may run one right after this step.
  if (coordinator_) {
    lead(now);
  } else {
    follow();
  }
  return true;
}

void Progress::apply(const ResponseList& response) {
  if (join_active_) join_active_ = Clock::now();
  Participant::Outcome outcome = participant_.apply(response);
  if (outcome.probed && on_probe_) on_probe_();
  for (Work& work : outcome.work) dispatch(work);
  for (const Failure& failure : outcome.failures) {
    fail_unit(units_.take(failure.token), std::make_shared<Error>(failure.code, failure.message, failure.rank));
  }
  if (outcome.fatal) fail(std::make_shared<Error>(outcome.fatal->code, outcome.fatal->message, outcome.fatal->rank));
}

void Progress::dispatch(Work& work) {
  for (const WorkUnit& unit : work.units) {
    if (unit.new_set) planes_.add(unit.created_set, *participant_.members(unit.created_set));
  }
  std::vector<InFlight> units;
  Assignment assignment;
  try {
    units.reserve(work.units.size());
    for (const WorkUnit& unit : work.units) {
      units.push_back(unit.unasked ? unasked(*unit.unasked) : units_.take(unit.token));
      if (!unit.unasked) pending_.fetch_sub(1, std::memory_order_relaxed);
    }
    for (const InFlight& unit : units) {
      if (unit.handle) recorder_.answered(unit.trace, unit.taken, now_);
    }
    // What nobody has shares a bucket whatever its kind; some kinds make a result even of that, an empty one.
    const bool runs = std::any_of(units.begin(), units.end(), [&](const InFlight& unit) {
      return moves_data(unit.kind) && (!work.skip || has_extents(unit.kind));
    });
    if (runs) {
      assignment = make_assignment(work, units, planes_.plane(work.process_set), endpoint_.rank());
      executor_.push(std::move(assignment));
    } else {
      complete(work, units);
    }
  } catch (const std::exception& cause) {
    // A unit that has been taken must be completed. Whoever has its handle now is to do it.
    const SharedError error = internal_error(cause);
    const auto give_up = [&](auto& unit) {
      if (!unit.handle) return;
      recorder_.dropped(unit.trace, *error);
      completion_.complete(std::move(unit.handle), {.error = error});
    };
    for (InFlight& unit : units) give_up(unit);
    for (FinishedUnit& unit : assignment.units) give_up(unit);
    completion_.notify();
    throw;
  }
}

// Units that run nothing.
void Progress::complete(Work& work, std::vector<InFlight>& units) {
  for (size_t i = 0; i < units.size(); ++i) {
    const OpKind kind = units[i].kind;
    if (kind == OpKind::kJoin) join_active_.reset();
    if (kind == OpKind::kRemoveProcessSet) planes_.remove(units[i].process_set);
    if (!units[i].handle) continue;
    WorkUnit& unit = work.units[i];
    recorder_.ended(units[i].trace, kind, nullptr, work.skip);
    if (work.skip) unit.skipped.assign(units[i].tensors.size(), true);
    completion_.complete(std::move(units[i].handle),
                         {nullptr, std::move(unit.skipped), unit.created_set, std::move(unit.extents)});
  }
  completion_.notify();
}

void Progress::fail_unit(InFlight unit, const SharedError& error) {
  pending_.fetch_sub(1, std::memory_order_relaxed);
  recorder_.ended(unit.trace, unit.kind, error.get(), false);
  completion_.complete(std::move(unit.handle), {.error = error});
  completion_.notify();
}

void Progress::fail_pending(const SharedError& error) {
  for (const UnitToken token : participant_.take_pending()) fail_unit(units_.take(token), error);
}

// What all members of a set had agreed on before the failure still runs, unless the rank at fault is one of them: its
// members have it in the same order, and some may have finished it already.
void Progress::fail(const SharedError& error) {
  completion_.fail(error);
  const SharedError failure = completion_.failure();
  planes_.abort(failure->rank());
  fail_pending(failure);
  executor_.fail_all(failure, failure->rank());
}

// Aborts no data plane: the peers may still be copying the results of the last bucket home, which needs nothing from
// this rank any more.
void Progress::close(const SharedError& error) {
  completion_.fail(error);
  const SharedError failure = completion_.failure();
  fail_pending(failure);
  executor_.fail_all(failure);
  take_submissions(Clock::now());
}

// A data plane has thrown here. The root is told, and its answer fails everybody alike; if none comes (the root is the
// one that stopped), this rank goes by what it knows.
void Progress::check_trouble(Clock::time_point now) {
  if (!executor_.has_trouble()) return;
  if (completion_.failed()) {  // the reason is known; nobody else would free those who wait for what was in trouble
    if (executor_.busy()) executor_.fail_all(completion_.failure());
    return;
  }
  const SharedError trouble = executor_.trouble();
  if (!trouble_since_) {
    trouble_since_ = now;
    trouble_seen_.store(true, std::memory_order_relaxed);
    // kPeerLost here only says "somebody aborted": that somebody tells the root. It may have been this rank.
    if (trouble->code() != ErrorCode::kPeerLost || trouble->rank() == endpoint_.rank()) report(*trouble, now);
  } else if (now - *trouble_since_ >= kTroublePatience) {
    report(*trouble, now);
    fail(trouble);
  }
}

void Progress::report(const Error& failure, Clock::time_point now) {
  participant_.report_failure({0, "", failure.code(), failure.rank(), failure.what()});
  if (coordinator_) {
    lead(now);
  } else {
    follow();
  }
}

bool Progress::has_new_trouble() const {
  return executor_.has_trouble() && !trouble_seen_.load(std::memory_order_relaxed) && !completion_.failed();
}

std::optional<Progress::Clock::time_point> Progress::deadline() {
  std::optional<Clock::time_point> at;
  const auto consider = [&at](Clock::time_point t) {
    if (!at || t < *at) at = t;
  };
  if (completion_.failed()) return at;
  if (trouble_since_) consider(*trouble_since_ + kTroublePatience);
  if (coordinator_) {
    if (const auto next = coordinator_->next_deadline()) consider(*next);
  } else if (config_.stall_abort_seconds > 0) {
    if (units_.oldest() != Clock::time_point::max()) {
      consider(units_.oldest() + to_duration(config_.stall_abort_seconds * 1.05) + kGrace);
    }
    // A join waits for as long as others work. But what they wait for meanwhile ends or is given up within the abort
    // time, and it began within the abort time of the last answer, or the join itself is given up.
    if (join_active_) consider(*join_active_ + to_duration(config_.stall_abort_seconds * 2.1) + kGrace);
  }
  return at;
}

std::optional<std::chrono::nanoseconds> Progress::time_to_deadline() {
  const auto at = deadline();
  if (!at) return std::nullopt;
  return std::max<std::chrono::nanoseconds>(*at - Clock::now(), std::chrono::nanoseconds(0));
}

void Progress::check_time(Clock::time_point now) {
  const auto at = deadline();
  if (!at || now < *at) return;
  if (coordinator_) {
    coordinator_->tick(now);
    for (const std::string& report : coordinator_->take_reports()) logger_.warning(report);
    lead(now);
    return;
  }
  if (trouble_since_) return;
  fail(std::make_shared<Error>(ErrorCode::kStalled,
                               "rank 0, which coordinates the job, has not answered for more than " +
                                   std::to_string(config_.stall_abort_seconds) +
                                   " s (stopped, swapping or stuck?). Look at that process; FUSEWIRE_STALL_ABORT_TIME "
                                   "sets how long to wait.",
                               0));
}

}  // namespace fusewire
