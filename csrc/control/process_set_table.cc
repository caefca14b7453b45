#include "control/process_set_table.h"

#include <numeric>
#include <string>
#include <utility>

#include "common/error.h"
#include "common/types.h"

namespace fusewire {

ProcessSet::ProcessSet(uint32_t number, std::vector<int32_t> sorted, int job_size)
    : id(number), ranks(std::move(sorted)), members(job_size) {
  for (const int32_t rank : ranks) members.insert(rank);
}

ProcessSetTable::ProcessSetTable(int size) : size_(size) {
  std::vector<int32_t> everybody(static_cast<size_t>(size));
  std::iota(everybody.begin(), everybody.end(), 0);
  add(std::move(everybody));
}

const ProcessSet* ProcessSetTable::find(uint32_t id) const {
  return id < sets_.size() && sets_[id].alive ? sets_[id].set.get() : nullptr;
}

const ProcessSet* ProcessSetTable::find(const std::vector<int32_t>& ranks) const {
  for (const Entry& entry : sets_) {
    if (entry.alive && entry.set->ranks == ranks) return entry.set.get();
  }
  return nullptr;
}

void ProcessSetTable::validate(const std::vector<int32_t>& ranks) const {
  int32_t previous = -1;
  for (const int32_t rank : ranks) {
    if (rank <= previous || rank >= size_) previous = size_;
    if (previous == size_) break;
    previous = rank;
  }
  if (!ranks.empty() && previous < size_) return;
  throw Error(ErrorCode::kInvalidArgument,
              "a process set needs at least one rank, in ascending order, each once, from 0 to " +
                  std::to_string(size_ - 1) + "; got " + to_string(Dims(ranks.begin(), ranks.end())));
}

uint32_t ProcessSetTable::add(std::vector<int32_t> ranks) {
  const auto id = static_cast<uint32_t>(sets_.size());
  sets_.push_back({std::make_unique<ProcessSet>(id, std::move(ranks), size_), true});
  return id;
}

void ProcessSetTable::validate_removal(uint32_t id) const {
  if (id == 0) throw Error(ErrorCode::kInvalidArgument, "the global process set cannot be removed");
  if (find(id) != nullptr) return;
  throw Error(ErrorCode::kInvalidArgument, "process set " + std::to_string(id) +
                                               (was_removed(id) ? " has been removed already" : " does not exist"));
}

void ProcessSetTable::remove(uint32_t id) { sets_[id].alive = false; }

}  // namespace fusewire
