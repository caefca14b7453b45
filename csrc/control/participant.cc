#include "control/participant.h"

#include <algorithm>
#include <atomic>
#include <string>
#include <utility>

#include "control/mismatch.h"
#include "control/process_set_table.h"
#include "control/unit.h"

namespace fusewire {
namespace {

// What this rank knows of one name in one process set: the description that the root holds under an id, and the unit in
// flight. Forgotten when it is neither cached nor in flight.
struct Record {
  uint32_t set = 0;
  const std::string* name = nullptr;  // the key it is stored under

  CacheId id = kNoCacheId;
  std::unique_ptr<UnitSpec> cached;  // what `id` stands for

  bool in_flight = false;
  UnitToken token = 0;
  std::unique_ptr<UnitSpec> fresh;  // the unit in flight where it does not mean `cached`, else null
  uint64_t message = 0;             // the number of the outgoing message with its request, and the place in there
  size_t place = 0;

  const UnitSpec& current() const { return fresh != nullptr ? *fresh : *cached; }
};

Error argument_error(const std::string& text) { return {ErrorCode::kInvalidArgument, text}; }
Error protocol_error(const std::string& text) { return {ErrorCode::kInternal, text}; }

std::string label(uint32_t set) { return "process set " + std::to_string(set); }
std::string members_of(const ProcessSet& set) { return rank_list({set.ranks.begin(), set.ranks.end()}); }

}  // namespace

struct Participant::Impl {
  // See Note [Debts] in coordinator.cc.
  struct Debt {
    uint32_t set;
    std::string name;
    Error error;
  };

  Impl(int own_rank, int size) : rank(own_rank), sets(size), records(1) {}

  const int rank;
  ProcessSetTable sets;
  std::vector<NameMap<Record>> records;  // by process set, then by name
  std::vector<Record*> by_id;            // mirrors the root's slots, as far as this rank is a member
  std::vector<Debt> debts;
  size_t in_flight = 0;
  bool joined = false;     // a kJoin is in flight: see Note [Joining]
  bool abandoned = false;  // take_pending() was called: what comes now meets nothing

  uint64_t applied = 0;
  bool acknowledge = false;  // an eviction wants an answer

  // Written by the driver alone.
  std::atomic<uint64_t> hits{0};
  std::atomic<uint64_t> misses{0};
  std::atomic<uint64_t> evictions{0};
  static void count(std::atomic<uint64_t>& counter) {
    counter.store(counter.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }

  // The outgoing message.
  uint64_t message = 1;  // counts them
  bool withdrawn = false;
  std::vector<Request> requests;  // one with neither id nor description has been withdrawn
  std::vector<uint64_t> completed;
  std::optional<ResponseError> failure;
  std::optional<std::string> activity;

  const ProcessSet& check(const UnitSpec& spec) const;
  void pay_debt(uint32_t set, const std::string& name);
  void announce(Record& record, const UnitSpec& spec, std::vector<bool>&& absent, std::vector<int64_t>&& extents);

  Record* find(uint32_t set, std::string_view name);
  Record& find_or_create(uint32_t set, const std::string& name);
  bool unsent(const Record& record) const { return record.in_flight && record.message == message; }
  void withdraw(const Record& record);
  void finish(Record& record);
  void drop_if_unused(Record& record);

  void evict(CacheId id);
  void remember(Record& record, CacheId id);
  Record& answered(const ResponseBucket& bucket, size_t index);
  bool takes_part_unasked(const UnitSpec& spec) const;
  Work run(const ResponseBucket& bucket, const ProcessSet& set, Outcome& outcome);
  void change_sets(const UnitSpec& spec, WorkUnit& unit, Outcome& outcome);
  void apply_error(const ResponseError& error, bool excused, Outcome& outcome);
};

// ---------------------------------------------------------------------------------------------------------------------

const ProcessSet& Participant::Impl::check(const UnitSpec& spec) const {
  if (spec.name.empty()) throw argument_error("a collective needs a name");
  if (joined) {
    throw argument_error(describe_unit(spec) + ": rank " + std::to_string(rank) +
                         " has joined and takes part in nothing by itself until join() has completed; wait for that");
  }
  if (spec.kind == OpKind::kAddProcessSet || spec.kind == OpKind::kAdoptProcessSet) sets.validate(spec.ranks);
  if (spec.kind == OpKind::kRemoveProcessSet) sets.validate_removal(spec.process_set);
  if (const std::string flaw = flaw_of(spec); !flaw.empty()) throw argument_error(describe_unit(spec) + ": " + flaw);
  const uint32_t id = negotiated_in(spec);
  const ProcessSet* set = sets.find(id);
  if (set == nullptr)
    throw argument_error(label(id) + (sets.was_removed(id) ? " has been removed" : " does not exist"));
  if (!set->contains(rank)) {
    throw argument_error("rank " + std::to_string(rank) + " is not a member of " + label(id) + " (" + members_of(*set) +
                         ")");
  }
  if (spec.kind == OpKind::kAdoptProcessSet && !std::binary_search(spec.ranks.begin(), spec.ranks.end(), rank)) {
    throw argument_error("rank " + std::to_string(rank) + " is not a member of the process set to adopt, " +
                         to_string(Dims(spec.ranks.begin(), spec.ranks.end())));
  }
  if (spec.kind == OpKind::kBroadcast && !std::binary_search(set->ranks.begin(), set->ranks.end(), spec.root)) {
    throw argument_error("the root of " + describe_unit(spec) + " is rank " + std::to_string(spec.root) +
                         ", which is not a member (" + members_of(*set) + ")");
  }
  return *set;
}

void Participant::Impl::pay_debt(uint32_t set, const std::string& name) {
  const auto debt =
      std::find_if(debts.begin(), debts.end(), [&](const Debt& d) { return d.set == set && d.name == name; });
  if (debt == debts.end()) return;
  const Error error = debt->error;
  debts.erase(debt);
  throw Error(error);
}

void Participant::Impl::announce(Record& record, const UnitSpec& spec, std::vector<bool>&& absent,
                                 std::vector<int64_t>&& extents) {
  Request& request = requests.emplace_back();
  request.absent = std::move(absent);
  request.extents = std::move(extents);
  if (record.id != kNoCacheId && agree(*record.cached, spec)) {
    request.id = record.id;
    count(hits);
  } else {
    count(misses);
    request.spec = std::make_unique<UnitSpec>(spec);
    record.fresh = std::make_unique<UnitSpec>(spec);
  }
  record.message = message;
  record.place = requests.size() - 1;
  record.in_flight = true;
  ++in_flight;
}

Record* Participant::Impl::find(uint32_t set, std::string_view name) {
  if (set >= records.size()) return nullptr;
  const auto found = records[set].find(name);
  return found == records[set].end() ? nullptr : &found->second;
}

Record& Participant::Impl::find_or_create(uint32_t set, const std::string& name) {
  NameMap<Record>& names = records[set];
  auto found = names.find(std::string_view(name));
  if (found == names.end()) {
    found = names.try_emplace(name).first;
    found->second.set = set;
    found->second.name = &found->first;
  }
  return found->second;
}

void Participant::Impl::withdraw(const Record& record) {
  if (!unsent(record)) return;
  requests[record.place] = {};
  withdrawn = true;
}

void Participant::Impl::finish(Record& record) {
  record.in_flight = false;
  record.fresh = nullptr;
  --in_flight;
}

void Participant::Impl::drop_if_unused(Record& record) {
  if (record.in_flight || record.id != kNoCacheId) return;
  NameMap<Record>& names = records[record.set];
  names.erase(names.find(*record.name));
}

// ---------------------------------------------------------------------------------------------------------------------

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
                           std::to_string(unit.id) + ") in " + label(bucket.process_set) +
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
    outcome.failures.push_back({record.token, ErrorCode::kInvalidArgument, -1,
                                label(set) + " was removed while '" + name + "' waited for other ranks to submit it"});
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

// ---------------------------------------------------------------------------------------------------------------------

Participant::Participant(int rank, int size) : impl_(std::make_unique<Impl>(rank, size)) {}
Participant::~Participant() = default;

void Participant::submit(const UnitSpec& spec, std::vector<bool> absent, UnitToken token,
                         std::vector<int64_t> extents) {
  Impl& impl = *impl_;
  const ProcessSet& members = impl.check(spec);
  const uint32_t set = members.id;
  if (!absent.empty() && absent.size() != spec.tensors.size()) {
    throw argument_error(describe_unit(spec) + ": " + std::to_string(absent.size()) + " absent bits for " +
                         std::to_string(spec.tensors.size()) + " tensors");
  }
  if (const std::string flaw = flaw_of(spec, extents, members.ranks.size()); !flaw.empty()) {
    throw argument_error(describe_unit(spec) + ": " + flaw);
  }
  const size_t per_tensor = extents.size() / std::max<size_t>(spec.tensors.size(), 1);
  for (size_t i = 0; i < absent.size(); ++i) {
    if (absent[i]) std::fill_n(extents.begin() + static_cast<ptrdiff_t>(i * per_tensor), per_tensor, 0);
  }
  if (!impl.debts.empty()) impl.pay_debt(set, spec.name);
  Record& record = impl.find_or_create(set, spec.name);
  if (record.in_flight) {
    throw Error(ErrorCode::kDuplicateName,
                describe_unit(spec) + " was submitted while an earlier '" + spec.name +
                    "' is still in flight; wait for that one first, or give this one another name");
  }
  record.token = token;
  impl.announce(record, spec, std::move(absent), std::move(extents));
  if (spec.kind == OpKind::kJoin) {
    impl.joined = true;
    impl.debts.clear();  // absent for what the others have given up
  }
}

void Participant::completed(uint64_t bucket) { impl_->completed.push_back(bucket); }

void Participant::report_failure(ResponseError failure) { impl_->failure = std::move(failure); }

void Participant::tell_activity(std::string text) {
  if (text.size() > kLongestActivity) {
    constexpr std::string_view kCut = "\n...\n";
    const size_t half = (kLongestActivity - kCut.size()) / 2;
    text = text.substr(0, half).append(kCut) + text.substr(text.size() - half);
  }
  impl_->activity = std::move(text);
}

bool Participant::has_outgoing() const {
  return !impl_->requests.empty() || !impl_->completed.empty() || impl_->acknowledge || impl_->failure ||
         impl_->activity;
}

RequestList Participant::take_outgoing() {
  Impl& impl = *impl_;
  RequestList list;
  list.acked = impl.applied;
  list.completed.swap(impl.completed);
  list.requests.swap(impl.requests);
  list.failure.swap(impl.failure);
  list.activity.swap(impl.activity);
  if (std::exchange(impl.withdrawn, false)) {
    std::erase_if(list.requests, [](const Request& r) { return r.id == kNoCacheId && r.spec == nullptr; });
  }
  impl.acknowledge = false;
  ++impl.message;
  return list;
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
    if (set == nullptr) throw protocol_error("a bucket for " + label(bucket.process_set) + ", which does not exist");
    if (set->contains(impl.rank)) outcome.work.push_back(impl.run(bucket, *set, outcome));
  }
  for (const ResponseError& error : response.errors) impl.apply_error(error, excused, outcome);
  return outcome;
}

CacheCounts Participant::cache_counts() const {
  const auto get = [](const std::atomic<uint64_t>& counter) { return counter.load(std::memory_order_relaxed); };
  return {get(impl_->hits), get(impl_->misses), get(impl_->evictions)};
}

size_t Participant::pending() const { return impl_->in_flight; }

std::vector<UnitToken> Participant::take_pending() {
  Impl& impl = *impl_;
  std::vector<UnitToken> tokens;
  for (NameMap<Record>& names : impl.records) {
    for (auto& [name, record] : names) {
      if (!record.in_flight) continue;
      impl.withdraw(record);
      impl.finish(record);
      tokens.push_back(record.token);
    }
  }
  std::sort(tokens.begin(), tokens.end());
  impl.abandoned = true;
  return tokens;
}

const std::vector<int32_t>* Participant::members(uint32_t process_set) const {
  const ProcessSet* set = impl_->sets.find(process_set);
  return set == nullptr ? nullptr : &set->ranks;
}

}  // namespace fusewire
