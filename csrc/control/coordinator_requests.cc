// What ranks say: who is ready for what.
#include <algorithm>
#include <utility>

#include "control/coordinator_state.h"
#include "control/mismatch.h"

namespace fusewire {

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
  if (message.activity) inspector.answered(rank, std::move(*message.activity));
  if (join != nullptr && !(message.requests.empty() && message.completed.empty())) put_off_join();
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
  if (joined.contains(rank)) return violation(rank, describe_unit(*spec) + " after it has joined");

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
  const UnitSpec& spec = description->spec;
  const std::vector<bool>& absent = request.absent;
  const size_t tensors = spec.tensors.size();
  const std::string flaw = flaw_of(spec, request.extents, set.ranks.size());
  if (!flaw.empty()) return violation(rank, describe_unit(spec) + " with " + flaw);
  if (!absent.empty() && absent.size() != tensors) {
    return violation(rank, "absent bits that do not fit " + describe_unit(spec));
  }
  if (spec.kind == OpKind::kAdoptProcessSet) {
    try {
      sets.validate(spec.ranks);
    } catch (const Error& error) {
      return violation(rank, error.what());
    }
    if (!std::binary_search(spec.ranks.begin(), spec.ranks.end(), rank)) {
      return violation(rank, describe_unit(spec) + " without being a member");
    }
  }

  bool dissents = false;
  if (unit.state == Unit::State::kIdle) {
    begin(unit, set, description, request);
  } else if (unit.state == Unit::State::kReady || unit.submitted.contains(rank)) {
    return violation(rank, describe_unit(spec) + " was submitted twice");
  } else if (description != unit.proposed && !agree(spec, unit.proposed->spec)) {
    auto dissent = std::find_if(unit.dissents.begin(), unit.dissents.end(),
                                [&](const Unit::Dissent& d) { return agree(d.description->spec, spec); });
    if (dissent == unit.dissents.end()) {
      dissent = unit.dissents.insert(unit.dissents.end(), {description, {}});
    }
    dissent->ranks.push_back(rank);
    dissents = true;
  } else if (unit.absences) {
    unit.absences = false;
    if (!absent.empty()) {
      for (size_t i = 0; i < tensors; ++i) {
        unit.absent[i] = unit.absent[i] && absent[i];
        unit.absences = unit.absences || unit.absent[i];
      }
    }
  }
  if (!dissents && !request.extents.empty()) bring(unit, rank, request.extents);
  unit.submitted.insert(rank);
  if (announced) announced(rank, unit.set_id, unit.name());
  if (unit.parties->contains(rank)) --unit.missing;
  if (spec.kind == OpKind::kJoin) {
    join = &unit;
    excuse(rank);
    if (fatal) return;
  }

  if (anyone_departed) {
    if (crashed >= 0) return fail_lost(crashed, &unit);
    if (const int gone = departed.first_common(unit.parties->members); gone >= 0) return fail_lost(gone, &unit);
  }
  if (unit.missing == 0) agreed(unit);
}

// The first of its parties is there.
void Coordinator::Impl::begin(Unit& unit, const ProcessSet& set, const DescriptionPtr& description,
                              const Request& request) {
  unit.state = Unit::State::kPending;
  cache.begin(&unit);
  unit.proposed = description;
  unit.set = unit.parties = &set;
  if (description->spec.kind == OpKind::kAdoptProcessSet) {
    unit.adopters = std::make_unique<const ProcessSet>(set.id, description->spec.ranks, size);
    unit.parties = unit.adopters.get();
  }
  unit.missing = static_cast<int>(unit.parties->ranks.size());
  if (join != nullptr) unit.missing -= joined.count_common(unit.parties->members);
  unit.submitted.reset(size);
  unit.absences = !request.absent.empty();
  if (unit.absences) unit.absent = request.absent;
  unit.extents.assign(request.extents.size() * set.ranks.size(), 0);
  unit.since = now;
  waiting.push_back(&unit);
}

void Coordinator::Impl::bring(Unit& unit, int rank, const std::vector<int64_t>& extents) {
  const auto member = std::lower_bound(unit.set->ranks.begin(), unit.set->ranks.end(), rank) - unit.set->ranks.begin();
  std::copy(extents.begin(), extents.end(), unit.extents.begin() + member * static_cast<ptrdiff_t>(extents.size()));
}

// The rank has joined: nobody waits for it any more.
void Coordinator::Impl::excuse(int rank) {
  joined.insert(rank);
  last_joined = rank;
  for (Unit* unit = waiting.front(); unit != nullptr; unit = WaitingUnits::next(unit)) {
    if (unit->parties->contains(rank) && !unit->submitted.contains(rank)) --unit->missing;
  }
  for (Unit* unit = waiting.front(); unit != nullptr && !fatal;) {
    Unit* next = WaitingUnits::next(unit);
    if (unit->missing == 0 && unit != join) {
      // A removal takes other units with it, `next` perhaps among them.
      if (changes_sets(unit->proposed->spec.kind)) next = nullptr;
      agreed(*unit);
      if (next == nullptr) next = waiting.front();
    }
    unit = next;
  }
}

// As long as the others work, nobody is late for the join.
void Coordinator::Impl::put_off_join() {
  waiting.erase(join);
  join->since = now;
  waiting.push_back(join);
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

}  // namespace fusewire
