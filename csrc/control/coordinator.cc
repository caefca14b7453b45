#include "control/coordinator.h"

#include <algorithm>
#include <deque>
#include <utility>

#include "control/fusion_planner.h"
#include "control/mismatch.h"
#include "control/process_set_table.h"
#include "control/response_cache.h"
#include "control/stall_inspector.h"
#include "control/unit.h"

namespace fusewire {

// The life of a unit at the root:
//
//   request() -> submit()     a member is ready for it                     kIdle -> kPending
//             -> agreed()     the last member is; it takes its place       kPending -> kReady, or an error
//                             in the one global order (FusionPlanner)
//   poll()    -> answer()     its bucket goes into a response              kReady -> kIdle, or forgotten
//
// Note [Debts]
// When a mismatch is answered before everybody has submitted the unit (its stall time was over), the late members owe
// a submission that would meet nobody: the others have raised already. It is settled without them. A participant that
// learns of the error remembers it and raises it from its own next submit; a submission that was on its way at that
// moment is recognised here, because its message acknowledges only responses before the error, and is dropped, because
// the participant will fail it when it learns of the error.
struct Coordinator::Impl {
  struct Debt {
    uint32_t set;
    std::string name;
    uint64_t sequence;  // of the response with the error
    RankSet debtors;
  };
  struct Lost {
    bool clean;
    std::string reason;
  };

  Impl(int size, const Config& config)
      : size(size),
        sets(size),
        cache(std::max<int64_t>(config.cache_capacity, 0), size),
        planner(config.fusion_threshold),
        inspector(size, config),
        departed(size),
        departures(static_cast<size_t>(size)) {}

  const int size;
  ProcessSetTable sets;
  UnitTable units;
  ResponseCache cache;
  FusionPlanner planner;
  StallInspector inspector;
  WaitingUnits waiting;
  uint64_t sequence = 0;  // of the last response
  TimePoint now{};

  std::vector<ResponseError> errors;  // for the next response
  std::vector<std::string> reports;
  std::vector<Debt> debts;

  RankSet departed;
  bool anyone_departed = false;
  std::vector<Lost> departures;  // by rank
  int crashed = -1;              // a rank that left without a goodbye while nobody needed it

  std::optional<ResponseError> fatal;
  bool answer_fatal = false;

  StallInspector::Watched watched() const { return {waiting, planner}; }
  void advance(TimePoint time) { now = std::max(now, time); }

  void fail(ErrorCode code, int rank, std::string message, const Unit* unit = nullptr) {
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
  void violation(int rank, const std::string& what) {
    fail(ErrorCode::kInternal, rank, "rank " + std::to_string(rank) + " broke the negotiation protocol: " + what);
  }
  void fail_lost(int rank, const Unit* unit) {
    const Lost& lost = departures[static_cast<size_t>(rank)];
    const std::string who = "rank " + std::to_string(rank);
    std::string text = lost.clean ? who + " has left the job" : who + " was lost";
    if (!lost.reason.empty()) text += " (" + lost.reason + ")";
    if (unit != nullptr) text += " and " + describe_unit(description_of(*unit).spec) + " needs it";
    text += lost.clean ? "; let all ranks make the same calls before they shut down"
                       : "; look for the cause in that rank's output, then start the job again";
    fail(ErrorCode::kPeerLost, rank, std::move(text), unit);
  }
  static const Description& description_of(const Unit& unit) { return unit.proposed ? *unit.proposed : *unit.cached; }

  // --- What ranks say ---

  void receive(int rank, RequestList&& message);
  void request(int rank, Request&& request);
  void submit(Unit& unit, const ProcessSet& set, int rank, const DescriptionPtr& description, const Request& request);
  void bring(Unit& unit, int rank, const std::vector<int64_t>& extents);
  bool settles_debt(int rank, uint32_t set, std::string_view name);
  void forgive(int rank, uint64_t acked);

  // --- What has been agreed ---

  void agreed(Unit& unit);
  void change_sets(Unit& unit);
  void fail_unit(Unit& unit, ErrorCode code, std::string message);
  void remove_set(uint32_t set);

  // --- What ranks are told ---

  ResponseUnit answer(Unit& unit);
  void rest(Unit& unit);
  bool make_room();
  void forget(Unit& unit);

  void leave(int rank, bool clean, const std::string& reason);
  void tick();
};

// ---------------------------------------------------------------------------------------------------------------------

void Coordinator::Impl::receive(int rank, RequestList&& message) {
  if (departed.contains(rank)) return;
  if (fatal) {
    answer_fatal = answer_fatal || !message.requests.empty();
    return;
  }
  if (message.acked > sequence) return violation(rank, "it acknowledges a response that was not given");
  // Debts first: a message that acknowledges the error was composed by a participant that knows of it.
  if (!debts.empty()) forgive(rank, message.acked);
  cache.acknowledge(rank, message.acked);
  for (const uint64_t bucket : message.completed) planner.complete(bucket, rank);
  if (message.failure) return fail(message.failure->code, message.failure->rank, std::move(message.failure->message));
  if (!message.requests.empty()) {
    const Request& last = message.requests.back();
    const ResponseCache::Slot* slot = cache.find(last.id);
    if (slot != nullptr) inspector.announced(rank, slot->description->spec.name, now);
    if (last.spec) inspector.announced(rank, last.spec->name, now);
  }
  for (Request& entry : message.requests) {
    request(rank, std::move(entry));
    if (fatal) return;
  }
}

void Coordinator::Impl::request(int rank, Request&& request) {
  const ResponseCache::Slot* slot = nullptr;
  Unit* unit = nullptr;
  const UnitSpec* spec = nullptr;
  if (request.id != kNoCacheId) {
    slot = cache.find(request.id);
    if (slot == nullptr) return violation(rank, "unknown cache id " + std::to_string(request.id));
    spec = &slot->description->spec;
    unit = slot->unit;
    if (unit == nullptr && slot->evicted_at <= cache.acknowledged(rank)) {
      return violation(rank, "cache id " + std::to_string(request.id) + " after its eviction");
    }
  } else {
    if (!request.spec) return violation(rank, "a request without a description");
    spec = request.spec.get();
  }

  const uint32_t set_id = negotiated_in(*spec);
  const ProcessSet* set = sets.find(set_id);
  if (set == nullptr) {
    // Submitted while the removal was on its way down; the participant fails it when the removal arrives.
    if (sets.was_removed(set_id)) return;
    return violation(rank, "unknown process set " + std::to_string(set_id));
  }
  if (!set->contains(rank)) return violation(rank, "it is not a member of process set " + std::to_string(set_id));
  if (!debts.empty() && settles_debt(rank, set_id, spec->name)) return;
  if (unit == nullptr) unit = &units.find_or_create(set_id, spec->name);

  if (slot != nullptr) return submit(*unit, *set, rank, slot->description, request);

  // Ranks that mean the same share one description.
  for (const DescriptionPtr* known : {&unit->proposed, &unit->cached}) {
    if (*known && agree((*known)->spec, *spec)) {
      const DescriptionPtr shared = *known;
      return submit(*unit, *set, rank, shared, request);
    }
  }
  submit(*unit, *set, rank, std::make_shared<const Description>(std::move(*request.spec)), request);
}

void Coordinator::Impl::submit(Unit& unit, const ProcessSet& set, int rank, const DescriptionPtr& description,
                               const Request& request) {
  const std::vector<bool>& absent = request.absent;
  const size_t tensors = description->spec.tensors.size();
  const bool bad_bits = !absent.empty() && absent.size() != tensors;
  const std::string bad_extents = flaw_of(description->spec, request.extents, set.ranks.size());
  if (!bad_extents.empty()) return violation(rank, describe_unit(description->spec) + " with " + bad_extents);
  bool dissents = false;
  if (unit.state == Unit::State::kIdle) {
    unit.state = Unit::State::kPending;
    cache.begin(&unit);
    unit.proposed = description;
    unit.set = &set;
    unit.missing = static_cast<int>(set.ranks.size());
    unit.submitted.reset(size);
    unit.absences = !absent.empty();
    if (unit.absences) unit.absent = absent;
    unit.extents.assign(request.extents.size() * set.ranks.size(), 0);
    unit.since = now;
    waiting.push_back(&unit);
  } else if (unit.state == Unit::State::kReady || unit.submitted.contains(rank)) {
    return violation(rank, describe_unit(description->spec) + " was submitted twice");
  } else if (description != unit.proposed && !agree(description->spec, unit.proposed->spec)) {
    auto dissent = std::find_if(unit.dissents.begin(), unit.dissents.end(),
                                [&](const Unit::Dissent& d) { return agree(d.description->spec, description->spec); });
    if (dissent == unit.dissents.end()) {
      dissent = unit.dissents.insert(unit.dissents.end(), {description, {}});
    }
    dissent->ranks.push_back(rank);
    dissents = true;
  } else if (unit.absences) {
    unit.absences = false;
    if (!absent.empty() && !bad_bits) {
      for (size_t i = 0; i < tensors; ++i) {
        unit.absent[i] = unit.absent[i] && absent[i];
        unit.absences = unit.absences || unit.absent[i];
      }
    }
  }
  if (bad_bits) return violation(rank, "absent bits that do not fit '" + unit.name() + "'");
  if (!dissents && !request.extents.empty()) bring(unit, rank, request.extents);
  unit.submitted.insert(rank);
  --unit.missing;

  if (anyone_departed) {
    if (crashed >= 0) return fail_lost(crashed, &unit);
    if (const int gone = departed.first_common(set.members); gone >= 0) return fail_lost(gone, &unit);
  }
  if (unit.missing == 0) agreed(unit);
}

void Coordinator::Impl::bring(Unit& unit, int rank, const std::vector<int64_t>& extents) {
  const auto member = std::lower_bound(unit.set->ranks.begin(), unit.set->ranks.end(), rank) - unit.set->ranks.begin();
  std::copy(extents.begin(), extents.end(), unit.extents.begin() + member * static_cast<ptrdiff_t>(extents.size()));
}

bool Coordinator::Impl::settles_debt(int rank, uint32_t set, std::string_view name) {
  // forgive() has dropped what this rank knows of, so a debt that is left is one whose error this message crossed.
  for (Debt& debt : debts) {
    if (debt.set != set || debt.name != name || !debt.debtors.contains(rank)) continue;
    debt.debtors.erase(rank);
    return true;
  }
  return false;
}

void Coordinator::Impl::forgive(int rank, uint64_t acked) {
  for (Debt& debt : debts) {
    if (debt.sequence <= acked) debt.debtors.erase(rank);
  }
  std::erase_if(debts, [](const Debt& debt) { return debt.debtors.empty(); });
}

// ---------------------------------------------------------------------------------------------------------------------

void Coordinator::Impl::agreed(Unit& unit) {
  waiting.erase(&unit);
  if (!unit.dissents.empty()) return fail_unit(unit, ErrorCode::kTensorMismatch, describe_mismatch(unit));
  const OpKind kind = unit.proposed->spec.kind;
  if (kind == OpKind::kAddProcessSet || kind == OpKind::kRemoveProcessSet) return change_sets(unit);

  ReadyUnit ready{&unit, {}, unit.proposed->bytes};
  if (has_extents(kind)) {
    const auto bytes = payload(unit.proposed->spec, unit.extents, unit.set->ranks.size());
    if (!bytes) {
      return fail_unit(unit, ErrorCode::kInvalidArgument,
                       describe_unit(unit.proposed->spec) + ": what the ranks bring together fits no memory");
    }
    ready.bytes = *bytes;
  }
  if (unit.absences) {
    for (size_t i = 0; i < unit.absent.size(); ++i) {
      if (unit.absent[i]) ready.skipped.push_back(static_cast<uint32_t>(i));
    }
  }
  const bool skip = unit.absences && ready.skipped.size() == unit.absent.size();
  if (skip) ready.skipped.clear();
  unit.state = Unit::State::kReady;
  planner.add(std::move(ready), skip);
}

void Coordinator::Impl::change_sets(Unit& unit) {
  const UnitSpec& spec = unit.proposed->spec;
  const bool add = spec.kind == OpKind::kAddProcessSet;
  try {
    add ? sets.validate(spec.ranks) : sets.validate_removal(spec.process_set);
  } catch (const Error& error) {
    return fail_unit(unit, error.code(), describe_unit(spec) + ": " + error.what());
  }
  if (add) {
    sets.add(spec.ranks);
  } else {
    remove_set(spec.process_set);
  }
  unit.state = Unit::State::kReady;
  planner.add({&unit, {}, 0}, false);
}

void Coordinator::Impl::remove_set(uint32_t set) {
  // What has been agreed keeps its place before the removal. What waits is dropped here, and every participant fails
  // its own part when it learns of the removal: it alone knows all that it has submitted.
  planner.close(set);
  for (Unit* unit : units.in_set(set)) {
    if (unit->state == Unit::State::kReady) continue;  // forgotten when answered
    if (unit->state == Unit::State::kPending) waiting.erase(unit);
    forget(*unit);
  }
  sets.remove(set);
}

void Coordinator::Impl::fail_unit(Unit& unit, ErrorCode code, std::string message) {
  ResponseError& error = errors.emplace_back();
  error.process_set = unit.set_id;
  error.name = unit.name();
  error.code = code;
  error.message = std::move(message);
  rest(unit);
}

// ---------------------------------------------------------------------------------------------------------------------

ResponseUnit Coordinator::Impl::answer(Unit& unit) {
  if (unit.id != kNoCacheId && unit.proposed == unit.cached) {
    if (!sets.was_removed(unit.set_id)) return {unit.id, {}, std::move(unit.extents)};
  }
  if (unit.id != kNoCacheId) cache.evict(&unit, sequence);
  ResponseUnit result{kNoCacheId, unit.name(), std::move(unit.extents)};
  if (unit.proposed->cacheable && !sets.was_removed(unit.set_id) && make_room()) result.id = cache.insert(&unit);
  return result;
}

bool Coordinator::Impl::make_room() {
  if (cache.has_room()) return true;
  Unit* victim = cache.least_recent();
  if (victim == nullptr) return false;
  cache.evict(victim, sequence);
  units.erase(victim);
  return true;
}

void Coordinator::Impl::rest(Unit& unit) {
  unit.state = Unit::State::kIdle;
  unit.dissents.clear();
  if (unit.id == kNoCacheId) {
    units.erase(&unit);
  } else {
    unit.proposed = nullptr;
    cache.settle(&unit);
  }
}

void Coordinator::Impl::forget(Unit& unit) {
  if (unit.id != kNoCacheId) cache.evict(&unit, sequence + 1);
  units.erase(&unit);
}

// ---------------------------------------------------------------------------------------------------------------------

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
    const int submitters = static_cast<int>(unit->set->ranks.size()) - unit->missing;
    if (submitters == 1 && unit->submitted.contains(rank)) {
      waiting.erase(unit);
      rest(*unit);
    } else if (needing == nullptr && (!clean || unit->set->contains(rank))) {
      needing = unit;
    }
    unit = next;
  }
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
      for (const int rank : unit->set->ranks) {
        if (unit->submitted.contains(rank) || departed.contains(rank)) continue;
        debt.debtors.insert(rank);
        late.push_back(rank);
      }
      waiting.erase(unit);
      fail_unit(*unit, ErrorCode::kTensorMismatch,
                describe_mismatch(*unit) + " (" + rank_list(late) + " had not submitted it in time)");
    }
    unit = next;
  }
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
  Impl& impl = *impl_;
  impl.advance(now);
  ResponseList list;
  if (impl.fatal) {
    if (!std::exchange(impl.answer_fatal, false)) return std::nullopt;
    list.sequence = ++impl.sequence;
    list.fatal = impl.fatal;
    return list;
  }
  std::vector<PlannedBucket> planned = impl.planner.take(impl.now);
  if (planned.empty() && impl.errors.empty() && !impl.cache.has_evicted()) return std::nullopt;
  list.sequence = ++impl.sequence;
  list.errors = std::exchange(impl.errors, {});
  list.buckets.reserve(planned.size());
  for (PlannedBucket& source : planned) {
    ResponseBucket& bucket = list.buckets.emplace_back();
    bucket.bucket = source.bucket;
    bucket.process_set = source.set->id;
    bucket.skip = source.skip;
    bucket.units.reserve(source.units.size());
    for (const ReadyUnit& ready : source.units) {
      for (const uint32_t tensor : ready.skipped) {
        bucket.skipped.emplace_back(static_cast<uint32_t>(bucket.units.size()), tensor);
      }
      bucket.units.push_back(impl.answer(*ready.unit));
    }
  }
  // Only now may they be evicted: a response's evictions are applied before its buckets.
  for (const PlannedBucket& source : planned) {
    for (const ReadyUnit& ready : source.units) impl.rest(*ready.unit);
  }
  list.evicted = impl.cache.take_evicted(impl.sequence);
  return list;
}

}  // namespace fusewire
