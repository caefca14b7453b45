// The half of a Participant that does what the root says: responses become work, in one order on all ranks.
#include <algorithm>
#include <memory>
#include <string>
#include <utility>

#include "control/mismatch.h"
#include "control/participant_state.h"

namespace fusewire {
namespace {

Error protocol_error(const std::string& text) { return {ErrorCode::kInternal, text}; }

}  // namespace

void Participant::Impl::evict(CacheId id) {
  if (id >= by_id.size() || by_id[id] == nullptr) return;  // of a set without this rank
  Record& record = *std::exchange(by_id[id], nullptr);
  count(evictions);
  record.id = kNoCacheId;
  if (record.in_flight && record.fresh == nullptr) {
    // Announced by the id. The root resolves that from messages that do not acknowledge the eviction (Note [Evicted
    // ids]), but one that has not been sent will acknowledge it.
    if (unsent(record)) {
      Request& request = requests[record.place];
      request.id = kNoCacheId;
      request.spec = std::make_unique<UnitSpec>(*record.cached);
    }
    record.fresh = std::move(record.cached);
  }
  record.cached = nullptr;
  drop_if_unused(record);
}

void Participant::Impl::remember(Record& record, CacheId id) {
  if (id >= by_id.size()) by_id.resize(id + size_t{1}, nullptr);
  by_id[id] = &record;
  record.id = id;
  if (record.fresh != nullptr) record.cached = std::move(record.fresh);
}

bool Participant::Impl::takes_part_unasked(const UnitSpec& spec) const {
  if (spec.kind == OpKind::kAdoptProcessSet && !std::binary_search(spec.ranks.begin(), spec.ranks.end(), rank)) {
    return true;
  }
  return joined && spec.kind != OpKind::kJoin;
}

// The record of a unit that this rank is told to run: one in flight, or else one that it takes part in unasked, with
// what everybody knows about it now.
Record& Participant::Impl::answered(const ResponseBucket& bucket, size_t index) {
  const ResponseUnit& unit = bucket.units[index];
  Record* record = nullptr;
  if (!unit.name.empty()) {
    record = find(bucket.process_set, unit.name);
  } else if (unit.id < by_id.size()) {
    record = by_id[unit.id];
  }
  if (record == nullptr || !record->in_flight || record->set != bucket.process_set) {
    const UnitSpec* described = bucket.described.empty() ? nullptr : &bucket.described[index];
    if (described == nullptr || !takes_part_unasked(*described)) {
      throw protocol_error("rank " + std::to_string(rank) + " is told to run '" + unit.name + "' (id " +
                           std::to_string(unit.id) + ") in " + set_label(bucket.process_set) +
                           " without having submitted it");
    }
    record = &find_or_create(bucket.process_set, described->name);
  }
  if (unit.id != kNoCacheId && unit.id != record->id) {
    if (!record->in_flight) record->cached = std::make_unique<UnitSpec>(bucket.described[index]);
    remember(*record, unit.id);
  }
  return *record;
}

Work Participant::Impl::run(const ResponseBucket& bucket, const ProcessSet& set, Outcome& outcome) {
  Work work;
  work.bucket = bucket.bucket;
  work.process_set = bucket.process_set;
  work.skip = bucket.skip;
  work.units.reserve(bucket.units.size());
  auto skipped = bucket.skipped.begin();  // by ascending unit
  for (size_t index = 0; index < bucket.units.size(); ++index) {
    Record& record = answered(bucket, index);
    WorkUnit& work_unit = work.units.emplace_back();
    if (!record.in_flight) work_unit.unasked = std::make_unique<const UnitSpec>(bucket.described[index]);
    const UnitSpec& spec = record.in_flight ? record.current() : *work_unit.unasked;
    work_unit.token = record.token;
    work_unit.extents = bucket.units[index].extents;
    const size_t expected =
        spec.kind == OpKind::kJoin ? 1 : extents_per_rank(spec, set.ranks.size()) * set.ranks.size();
    if (work_unit.extents.size() != expected) {
      throw protocol_error("the answer to " + describe_unit(spec) + " does not say what every member brings");
    }
    for (; skipped != bucket.skipped.end() && skipped->first == index; ++skipped) {
      if (skipped->second >= spec.tensors.size()) throw protocol_error("a tensor that does not exist is skipped");
      work_unit.skipped.resize(spec.tensors.size());
      work_unit.skipped[skipped->second] = true;
    }
    work.report_completion = work.report_completion || (moves_data(spec.kind) && !bucket.skip && set.first() == rank);
    if (changes_sets(spec.kind)) change_sets(spec, work_unit, outcome);
    if (spec.kind == OpKind::kJoin) joined = false;
    if (record.in_flight) finish(record);
    drop_if_unused(record);
  }
  if (skipped != bucket.skipped.end()) throw protocol_error("a tensor of a unit that does not exist is skipped");
  return work;
}

void Participant::Impl::change_sets(const UnitSpec& spec, WorkUnit& unit, Outcome& outcome) {
  if (spec.kind != OpKind::kRemoveProcessSet) {
    const ProcessSet* known = spec.kind == OpKind::kAdoptProcessSet ? sets.find(spec.ranks) : nullptr;
    unit.new_set = known == nullptr;
    unit.created_set = unit.new_set ? sets.add(spec.ranks) : known->id;
    if (unit.new_set) records.resize(unit.created_set + size_t{1});
    return;
  }
  const uint32_t set = spec.process_set;
  sets.remove(set);
  for (auto& [name, record] : records[set]) {
    if (record.id != kNoCacheId) by_id[record.id] = nullptr;
    if (!record.in_flight) continue;
    withdraw(record);
    finish(record);
    outcome.failures.push_back(
        {record.token, ErrorCode::kInvalidArgument, -1,
         set_label(set) + " was removed while '" + name + "' waited for other ranks to submit it"});
  }
  records[set].clear();
}

// `excused`: this rank had joined, so others did not wait for it, and it owes them nothing.
void Participant::Impl::apply_error(const ResponseError& error, bool excused, Outcome& outcome) {
  const ProcessSet* set = sets.find(error.process_set);
  if (set == nullptr || !set->contains(rank)) return;
  Record* record = find(error.process_set, error.name);
  if (record == nullptr || !record->in_flight) {
    if (!excused) debts.push_back({error.process_set, error.name, Error(error.code, error.message, error.rank)});
    return;
  }
  withdraw(*record);
  outcome.failures.push_back({record->token, error.code, error.rank, error.message});
  finish(*record);
  drop_if_unused(*record);
}

Participant::Outcome Participant::apply(const ResponseList& response) {
  Impl& impl = *impl_;
  if (response.sequence != impl.applied + 1) {
    throw protocol_error("response " + std::to_string(response.sequence) + " follows response " +
                         std::to_string(impl.applied));
  }
  impl.applied = response.sequence;
  const bool excused = impl.joined;  // even if this response has the answer to the join
  Outcome outcome;
  outcome.fatal = response.fatal;
  outcome.probed = std::find(response.probed.begin(), response.probed.end(), impl.rank) != response.probed.end();
  if (impl.abandoned) return outcome;
  for (const CacheId id : response.evicted) impl.evict(id);
  if (!response.evicted.empty()) impl.acknowledge = true;
  for (const ResponseBucket& bucket : response.buckets) {
    const ProcessSet* set = impl.sets.find(bucket.process_set);
    if (set == nullptr)
      throw protocol_error("a bucket for " + set_label(bucket.process_set) + ", which does not exist");
    if (set->contains(impl.rank)) outcome.work.push_back(impl.run(bucket, *set, outcome));
  }
  for (const ResponseError& error : response.errors) impl.apply_error(error, excused, outcome);
  return outcome;
}

}  // namespace fusewire
