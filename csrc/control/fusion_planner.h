// Which ready units run together, and when.
//
// Note [Group commit]
// As a database gathers commits while the disk is busy, units gather while their process set is busy: with fewer than
// two of its buckets answered and not yet complete, everything that is ready starts at once; otherwise it waits for a
// completion, and what becomes ready meanwhile joins it. No timer is involved: an idle set starts the first unit
// without delay, and the busier it is the larger the buckets get. A bucket that cannot grow any more gains nothing by
// waiting, so it starts at once, too.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "control/unit.h"

namespace fusewire {

struct ReadyUnit {
  Unit* unit = nullptr;
  std::vector<uint32_t> skipped;  // tensors for which all members are absent
  int64_t bytes = 0;              // of what the data plane has to move
};

struct PlannedBucket {
  uint64_t bucket = 0;
  const ProcessSet* set = nullptr;
  bool skip = false;
  std::vector<ReadyUnit> units;
};

// A bucket that the ranks are running.
struct RunningBucket {
  const ProcessSet* set = nullptr;
  std::string first_unit;
  size_t units = 0;
  TimePoint since;
};

class FusionPlanner {
 public:
  explicit FusionPlanner(int64_t threshold) : threshold_(threshold) {}

  // Takes a unit whose members have all submitted it. `skip`: all were absent for all of it; such units share one
  // bucket per set, whatever their kinds.
  void add(ReadyUnit unit, bool skip);

  // No more units will come for this set, or for any: what has gathered starts.
  void close(uint32_t set);
  void close_all();

  // The buckets to start now, in the order in which their first units became ready.
  std::vector<PlannedBucket> take(TimePoint now);

  // `rank` says it has finished the bucket; only the word of the set's first member counts.
  void complete(uint64_t bucket, int rank);
  // The rank is gone: whatever it was to report counts as complete.
  void leave(int rank);

  const std::map<uint64_t, RunningBucket>& running() const { return running_; }  // oldest first
  // Some unit that is ready but not started, of those that include `rank` if one is given; nullptr: none.
  const Unit* gathered(std::optional<int> rank) const;

 private:
  struct Gathering {
    FuseKey key;
    bool skip = false;
    int64_t bytes = 0;
    uint64_t order = 0;
    std::vector<ReadyUnit> units;
  };
  struct SetState {
    const ProcessSet* set = nullptr;
    int running = 0;
    bool listed = false;            // in `busy_`
    std::vector<Gathering> open;    // one per key
    std::vector<Gathering> sealed;  // cannot grow
  };

  void seal(SetState& state, size_t index);

  int64_t threshold_;
  uint64_t next_order_ = 0;
  uint64_t next_bucket_ = 1;
  std::unordered_map<uint32_t, SetState> sets_;
  std::vector<uint32_t> busy_;  // sets that hold units
  std::map<uint64_t, RunningBucket> running_;
};

}  // namespace fusewire
