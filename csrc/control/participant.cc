// The half of a Participant that announces: what this rank submits, and what the root is told.
#include "control/participant.h"

#include <algorithm>
#include <string>
#include <utility>

#include "control/mismatch.h"
#include "control/participant_state.h"

namespace fusewire {
namespace {

Error argument_error(const std::string& text) { return {ErrorCode::kInvalidArgument, text}; }

std::string members_of(const ProcessSet& set) { return rank_list({set.ranks.begin(), set.ranks.end()}); }

}  // namespace

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
    throw argument_error(set_label(id) + (sets.was_removed(id) ? " has been removed" : " does not exist"));
  if (!set->contains(rank)) {
    throw argument_error("rank " + std::to_string(rank) + " is not a member of " + set_label(id) + " (" +
                         members_of(*set) + ")");
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
