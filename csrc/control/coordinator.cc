#include "control/coordinator.h"

#include <utility>

#include "control/coordinator_state.h"
#include "control/mismatch.h"

namespace fusewire {

void Coordinator::Impl::fail(ErrorCode code, int rank, std::string message, const Unit* unit) {
  if (fatal) return;
  fatal.emplace();
  fatal->code = code;
  fatal->rank = rank;
  fatal->message = std::move(message);
  if (unit != nullptr) {
    fatal->process_set = unit->set_id;
    fatal->name = unit->name();
  }
  answer_fatal = true;
}

void Coordinator::Impl::violation(int rank, const std::string& what) {
  fail(ErrorCode::kInternal, rank, "rank " + std::to_string(rank) + " broke the negotiation protocol: " + what);
}

void Coordinator::Impl::fail_lost(int rank, const Unit* unit) {
  const Lost& lost = departures[static_cast<size_t>(rank)];
  const std::string who = "rank " + std::to_string(rank);
  std::string text = lost.clean ? who + " has left the job" : who + " was lost";
  if (!lost.reason.empty()) text += " (" + lost.reason + ")";
  if (unit != nullptr) text += " and " + describe_unit(unit->description().spec) + " needs it";
  text += lost.clean ? "; let all ranks make the same calls before they shut down"
                     : "; look for the cause in that rank's output, then start the job again";
  fail(ErrorCode::kPeerLost, rank, std::move(text), unit);
}

void Coordinator::Impl::leave(int rank, bool clean, const std::string& reason) {
  if (departed.contains(rank)) return;
  departed.insert(rank);
  anyone_departed = true;
  departures[static_cast<size_t>(rank)] = {clean, reason};
  cache.leave(rank);
  forgive(rank, UINT64_MAX);
  const bool running = !planner.running().empty();
  planner.leave(rank);
  if (fatal) return;

  // Who waits for it? What it alone has submitted keeps nobody waiting and goes with it.
  const Unit* needing = nullptr;
  for (Unit* unit = waiting.front(); unit != nullptr;) {
    Unit* next = WaitingUnits::next(unit);
    if (unit->submitted.contains(rank) && unit->submitted.count() == 1) {
      if (unit == join) join = nullptr;
      waiting.erase(unit);
      rest(*unit);
    } else if (needing == nullptr && (!clean || unit->parties->contains(rank))) {
      needing = unit;
    }
    unit = next;
  }
  joined.erase(rank);
  if (needing == nullptr) needing = planner.gathered(clean ? std::optional<int>(rank) : std::nullopt);
  if (needing != nullptr || (running && !clean)) return fail_lost(rank, needing);
  if (!clean && crashed < 0) crashed = rank;
}

void Coordinator::Impl::tick() {
  if (fatal) return;
  for (Unit* unit = waiting.front(); unit != nullptr && inspector.expired(unit->since, now);) {
    Unit* next = WaitingUnits::next(unit);
    if (!unit->dissents.empty()) {
      Debt& debt = debts.emplace_back(Debt{unit->set_id, unit->name(), sequence + 1, RankSet(size)});
      std::vector<int> late;
      for (const int rank : unit->parties->ranks) {
        if (unit->submitted.contains(rank) || joined.contains(rank) || departed.contains(rank)) continue;
        debt.debtors.insert(rank);
        late.push_back(rank);
      }
      waiting.erase(unit);
      fail_unit(*unit, ErrorCode::kTensorMismatch,
                describe_mismatch(*unit) + " (" + rank_list(late) + " had not submitted it in time)");
    }
    unit = next;
  }
  probes = inspector.probe(watched(), now);
  const Unit* oldest = waiting.front();
  const auto& running = planner.running();
  const bool late = oldest != nullptr && inspector.expired(oldest->since, now);
  if (late || (!running.empty() && inspector.expired(running.begin()->second.since, now))) {
    StallInspector::Verdict verdict = inspector.verdict(watched(), now);
    return fail(ErrorCode::kStalled, verdict.rank, std::move(verdict.message), late ? oldest : nullptr);
  }
  if (auto report = inspector.report(watched(), now)) reports.push_back(std::move(*report));
}

// ---------------------------------------------------------------------------------------------------------------------

Coordinator::Coordinator(int size, const Config& config) : impl_(std::make_unique<Impl>(size, config)) {}
Coordinator::~Coordinator() = default;

void Coordinator::on_announced(AnnouncedCallback callback) { impl_->announced = std::move(callback); }

void Coordinator::receive(int rank, RequestList&& message, TimePoint now) {
  impl_->advance(now);
  impl_->receive(rank, std::move(message));
}

void Coordinator::leave(int rank, bool clean, const std::string& reason, TimePoint now) {
  impl_->advance(now);
  impl_->leave(rank, clean, reason);
}

void Coordinator::tick(TimePoint now) {
  impl_->advance(now);
  impl_->tick();
}

std::optional<TimePoint> Coordinator::next_deadline() const {
  if (impl_->fatal) return std::nullopt;
  return impl_->inspector.next_deadline(impl_->watched());
}

std::vector<std::string> Coordinator::take_reports() { return std::exchange(impl_->reports, {}); }

std::optional<ResponseList> Coordinator::poll(TimePoint now) {
  impl_->advance(now);
  return impl_->respond();
}

}  // namespace fusewire
