#include "control/fusion_planner.h"

#include <algorithm>

namespace fusewire {
namespace {

constexpr int kBucketsInFlight = 2;

}  // namespace

void FusionPlanner::add(ReadyUnit unit, bool skip) {
  const Description& description = *unit.unit->proposed;
  SetState& state = sets_[unit.unit->set_id];
  state.set = unit.unit->set;
  if (!state.listed) {
    state.listed = true;
    busy_.push_back(unit.unit->set_id);
  }
  const bool alone = !skip && (!description.fusible || threshold_ <= 0 || unit.bytes >= threshold_);
  if (alone) {
    Gathering& gathering = state.sealed.emplace_back();
    gathering.order = next_order_++;
    gathering.key = description.key;
    gathering.units.push_back(std::move(unit));
    return;
  }
  for (size_t i = 0; i < state.open.size(); ++i) {
    Gathering& gathering = state.open[i];
    if (gathering.skip != skip || (!skip && gathering.key != description.key)) continue;
    if (!skip && gathering.bytes > threshold_ - unit.bytes) {
      seal(state, i);
      break;
    }
    gathering.bytes += skip ? 0 : unit.bytes;
    gathering.units.push_back(std::move(unit));
    return;
  }
  Gathering& gathering = state.open.emplace_back();
  gathering.key = description.key;
  gathering.skip = skip;
  gathering.bytes = skip ? 0 : unit.bytes;
  gathering.order = next_order_++;
  gathering.units.push_back(std::move(unit));
}

void FusionPlanner::seal(SetState& state, size_t index) {
  state.sealed.push_back(std::move(state.open[index]));
  state.open.erase(state.open.begin() + static_cast<ptrdiff_t>(index));
}

void FusionPlanner::close(uint32_t set) {
  const auto found = sets_.find(set);
  if (found == sets_.end()) return;
  while (!found->second.open.empty()) seal(found->second, 0);
}

void FusionPlanner::close_all() {
  for (const uint32_t set : busy_) close(set);
}

std::vector<PlannedBucket> FusionPlanner::take(TimePoint now) {
  std::vector<std::pair<Gathering, SetState*>> starting;
  std::vector<uint32_t> still_busy;
  for (const uint32_t id : busy_) {
    SetState& state = sets_.at(id);
    const bool free = state.running < kBucketsInFlight;
    for (size_t i = 0; i < state.open.size();) {
      const bool full = state.open[i].bytes >= threshold_;
      if (free || full || state.open[i].skip) {
        seal(state, i);
      } else {
        ++i;
      }
    }
    for (Gathering& gathering : state.sealed) starting.emplace_back(std::move(gathering), &state);
    state.sealed.clear();
    state.listed = !state.open.empty();
    if (state.listed) still_busy.push_back(id);
  }
  busy_ = std::move(still_busy);
  std::sort(starting.begin(), starting.end(),
            [](const auto& a, const auto& b) { return a.first.order < b.first.order; });

  std::vector<PlannedBucket> result;
  result.reserve(starting.size());
  for (auto& [gathering, state] : starting) {
    PlannedBucket& planned = result.emplace_back();
    planned.bucket = next_bucket_++;
    planned.set = state->set;
    planned.skip = gathering.skip;
    planned.units = std::move(gathering.units);
    if (planned.skip || !moves_data(gathering.key.kind)) continue;
    ++state->running;
    running_.emplace_hint(running_.end(), planned.bucket,
                          RunningBucket{state->set, planned.units.front().unit->name(), planned.units.size(), now});
  }
  return result;
}

void FusionPlanner::complete(uint64_t bucket, int rank) {
  const auto found = running_.find(bucket);
  if (found == running_.end() || found->second.set->first() != rank) return;
  --sets_.at(found->second.set->id).running;
  running_.erase(found);
}

void FusionPlanner::leave(int rank) {
  for (auto it = running_.begin(); it != running_.end();) {
    const uint64_t bucket = it->first;
    ++it;
    complete(bucket, rank);
  }
}

const Unit* FusionPlanner::gathered(std::optional<int> rank) const {
  for (const uint32_t id : busy_) {
    const SetState& state = sets_.at(id);
    if (rank && !state.set->contains(*rank)) continue;
    for (const auto* list : {&state.sealed, &state.open}) {
      if (!list->empty()) return list->front().units.front().unit;
    }
  }
  return nullptr;
}

}  // namespace fusewire
