#include "control/response_cache.h"

#include <limits>
#include <utility>

namespace fusewire {

ResponseCache::ResponseCache(int64_t capacity, int ranks)
    : capacity_(capacity), ranks_(ranks), acknowledged_(static_cast<size_t>(ranks), 0) {}

CacheId ResponseCache::insert(Unit* unit) {
  CacheId id = 0;
  if (free_.empty()) {
    id = static_cast<CacheId>(slots_.size());
    slots_.emplace_back();
  } else {
    id = free_.back();
    free_.pop_back();
  }
  unit->id = id;
  unit->cached = unit->proposed;
  slots_[id] = {unit->cached, unit, 0};
  ++active_;
  return id;
}

void ResponseCache::evict(Unit* unit, uint64_t sequence) {
  if (IdleUnits::linked(unit)) idle_.erase(unit);
  Slot& slot = slots_[unit->id];
  slot.unit = nullptr;
  slot.evicted_at = sequence;
  evicted_.push_back(unit->id);
  unit->id = kNoCacheId;
  --active_;
  ++leaving_;
}

void ResponseCache::begin(Unit* unit) {
  if (IdleUnits::linked(unit)) idle_.erase(unit);
}

void ResponseCache::settle(Unit* unit) { idle_.push_back(unit); }

std::vector<CacheId> ResponseCache::take_evicted(uint64_t sequence) {
  if (!evicted_.empty()) batches_.push_back({sequence, ranks_, evicted_});
  return std::exchange(evicted_, {});
}

void ResponseCache::acknowledge(int rank, uint64_t sequence) {
  uint64_t& known = acknowledged_[static_cast<size_t>(rank)];
  if (sequence <= known) return;
  for (Batch& batch : batches_) {
    if (batch.sequence > sequence) break;
    if (batch.sequence > known) --batch.awaited;
  }
  known = sequence;
  // A rank acknowledges in order, so a batch is never complete before an earlier one.
  while (!batches_.empty() && batches_.front().awaited == 0) {
    for (const CacheId id : batches_.front().ids) {
      slots_[id] = {};
      free_.push_back(id);
    }
    leaving_ -= static_cast<int64_t>(batches_.front().ids.size());
    batches_.pop_front();
  }
}

void ResponseCache::leave(int rank) {
  acknowledge(rank, std::numeric_limits<uint64_t>::max());
  --ranks_;
}

}  // namespace fusewire
