// The root's authority over cache ids: it alone gives and takes them, so ranks never have to agree on an eviction.
//
// Note [Evicted ids]
// A rank may announce a unit by an id that the root has just evicted: the two messages cross. So an evicted slot keeps
// its description, and an announcement still resolves, until every rank has acknowledged the response that carried the
// eviction; only then is the id given to another unit. A unit in flight is never evicted to make room.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "control/unit.h"

namespace fusewire {

class ResponseCache {
 public:
  struct Slot {
    DescriptionPtr description;  // null: free
    Unit* unit = nullptr;        // null: evicted (or free)
    uint64_t evicted_at = 0;     // the response that carries the eviction
  };

  // `capacity` units at most; 0 caches nothing.
  ResponseCache(int64_t capacity, int ranks);

  const Slot* find(CacheId id) const {
    return id < slots_.size() && slots_[id].description != nullptr ? &slots_[id] : nullptr;
  }

  // Whether a unit can be added without evicting one, and the least recently used one that may go (nullptr: none).
  bool has_room() const { return active_ < capacity_; }
  Unit* least_recent() const { return capacity_ > 0 && !crowded() ? idle_.front() : nullptr; }
  // Too many evictions wait for a slow rank's acknowledgement: nothing is added, so that ids stay bounded.
  bool crowded() const { return leaving_ >= capacity_; }

  // `unit` gets an id for its `proposed` description. There must be room.
  CacheId insert(Unit* unit);
  // The response numbered `sequence` tells the ranks.
  void evict(Unit* unit, uint64_t sequence);

  // In flight (not to be evicted), and at rest again as the most recently used.
  void begin(Unit* unit);
  void settle(Unit* unit);

  // The ids evicted since the last call; the response numbered `sequence` is about to carry them.
  std::vector<CacheId> take_evicted(uint64_t sequence);
  bool has_evicted() const { return !evicted_.empty(); }

  // `rank` has applied all responses up to `sequence`, or has left for good.
  void acknowledge(int rank, uint64_t sequence);
  void leave(int rank);
  uint64_t acknowledged(int rank) const { return acknowledged_[static_cast<size_t>(rank)]; }

 private:
  struct Batch {
    uint64_t sequence;
    int awaited;  // ranks that have not acknowledged it
    std::vector<CacheId> ids;
  };

  int64_t capacity_;
  int64_t active_ = 0;   // slots with a unit
  int64_t leaving_ = 0;  // slots evicted and not free yet
  int ranks_;            // still here
  std::vector<Slot> slots_;
  std::vector<CacheId> free_;
  std::vector<CacheId> evicted_;
  std::deque<Batch> batches_;  // ascending sequences
  std::vector<uint64_t> acknowledged_;
  IdleUnits idle_;
};

}  // namespace fusewire
