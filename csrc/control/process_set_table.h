// Which ranks form which process set. The root and every participant keep one and change it at the same places of the
// global order, so the ids are equal everywhere.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "control/rank_set.h"

namespace fusewire {

struct ProcessSet {
  ProcessSet(uint32_t number, std::vector<int32_t> sorted, int job_size);

  uint32_t id;
  std::vector<int32_t> ranks;  // global, sorted
  RankSet members;

  bool contains(int rank) const { return members.contains(rank); }
  int first() const { return ranks.front(); }
};

class ProcessSetTable {
 public:
  explicit ProcessSetTable(int size);  // holds the global set, 0

  const ProcessSet* find(uint32_t id) const;                        // nullptr: never existed or removed
  const ProcessSet* find(const std::vector<int32_t>& ranks) const;  // the first with exactly these; nullptr: none
  bool was_removed(uint32_t id) const { return id < sets_.size() && !sets_[id].alive; }

  // Throws Error(kInvalidArgument) unless `ranks` is a non-empty ascending list of ranks of the job.
  void validate(const std::vector<int32_t>& ranks) const;
  uint32_t add(std::vector<int32_t> ranks);  // validated ranks

  // Throws Error(kInvalidArgument) unless the set may be removed.
  void validate_removal(uint32_t id) const;
  void remove(uint32_t id);  // pointers to the set stay valid

 private:
  struct Entry {
    std::unique_ptr<ProcessSet> set;
    bool alive = true;
  };
  int size_;
  std::vector<Entry> sets_;
};

}  // namespace fusewire
