// What ranks are told: buckets in one global order, errors, evictions.
#include <utility>

#include "control/coordinator_state.h"
#include "control/mismatch.h"

namespace fusewire {

void Coordinator::Impl::agreed(Unit& unit) {
  waiting.erase(&unit);
  if (!unit.dissents.empty()) return fail_unit(unit, ErrorCode::kTensorMismatch, describe_mismatch(unit));
  const UnitSpec& spec = unit.proposed->spec;
  unit.incomplete = unit.submitted.count() < static_cast<int>(unit.set->ranks.size());
  if (spec.kind == OpKind::kJoin) return all_joined(unit);
  if (changes_sets(spec.kind)) return change_sets(unit);
  if (spec.kind == OpKind::kBroadcast && !unit.submitted.contains(spec.root)) {
    return fail_unit(unit, ErrorCode::kInvalidArgument,
                     describe_unit(spec) + ": its root, rank " + std::to_string(spec.root) +
                         ", has joined and sends nothing; let a rank that still has data be the root",
                     spec.root);
  }

  ReadyUnit ready{&unit, {}, unit.proposed->bytes};
  if (has_extents(spec.kind)) {
    const auto bytes = payload(spec, unit.extents, unit.set->ranks.size());
    if (!bytes) {
      return fail_unit(unit, ErrorCode::kInvalidArgument,
                       describe_unit(spec) + ": what the ranks bring together fits no memory");
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

void Coordinator::Impl::all_joined(Unit& unit) {
  joined.reset(size);
  join = nullptr;
  unit.extents = {last_joined};
  unit.state = Unit::State::kReady;
  planner.close_all();  // what joined ranks take part in comes before the answer
  planner.add({&unit, {}, 0}, false);
}

void Coordinator::Impl::change_sets(Unit& unit) {
  const UnitSpec& spec = unit.proposed->spec;
  try {
    if (spec.kind == OpKind::kRemoveProcessSet) {
      sets.validate_removal(spec.process_set);
      remove_set(spec.process_set);
    } else {
      sets.validate(spec.ranks);
      if (spec.kind == OpKind::kAddProcessSet || sets.find(spec.ranks) == nullptr) sets.add(spec.ranks);
    }
  } catch (const Error& error) {
    return fail_unit(unit, error.code(), describe_unit(spec) + ": " + error.what());
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

void Coordinator::Impl::fail_unit(Unit& unit, ErrorCode code, std::string message, int rank) {
  ResponseError& error = errors.emplace_back();
  error.process_set = unit.set_id;
  error.name = unit.name();
  error.code = code;
  error.rank = rank;
  error.message = std::move(message);
  rest(unit);
}

// ---------------------------------------------------------------------------------------------------------------------

std::optional<ResponseList> Coordinator::Impl::respond() {
  ResponseList list;
  if (fatal) {
    if (!std::exchange(answer_fatal, false)) return std::nullopt;
    list.sequence = ++sequence;
    list.fatal = fatal;
    return list;
  }
  const std::vector<PlannedBucket> planned = planner.take(now);
  if (planned.empty() && errors.empty() && probes.empty() && !cache.has_evicted()) return std::nullopt;
  list.sequence = ++sequence;
  list.errors = std::exchange(errors, {});
  const std::vector<int> asked = std::exchange(probes, {});
  list.probed.assign(asked.begin(), asked.end());
  list.buckets.reserve(planned.size());
  for (const PlannedBucket& bucket : planned) list.buckets.push_back(describe(bucket));
  // Only now may they be evicted: a response's evictions are applied before its buckets.
  for (const PlannedBucket& bucket : planned) {
    for (const ReadyUnit& ready : bucket.units) rest(*ready.unit);
  }
  list.evicted = cache.take_evicted(sequence);
  return list;
}

ResponseBucket Coordinator::Impl::describe(const PlannedBucket& planned) {
  ResponseBucket bucket;
  bucket.bucket = planned.bucket;
  bucket.process_set = planned.set->id;
  bucket.skip = planned.skip;
  bucket.units.reserve(planned.units.size());
  bool incomplete = false;
  for (const ReadyUnit& ready : planned.units) {
    for (const uint32_t tensor : ready.skipped) {
      bucket.skipped.emplace_back(static_cast<uint32_t>(bucket.units.size()), tensor);
    }
    incomplete = incomplete || ready.unit->incomplete;
    bucket.units.push_back(answer(*ready.unit));
  }
  if (incomplete) {
    for (const ReadyUnit& ready : planned.units) bucket.described.push_back(ready.unit->proposed->spec);
  }
  return bucket;
}

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

}  // namespace fusewire
