#include "engine/plane_table.h"

#include <algorithm>
#include <string>
#include <utility>

#include "common/error.h"

namespace fusewire {
void PlaneTable::add(uint32_t process_set, std::vector<int32_t> ranks) {
  const PlaneSet set{process_set, ranks};
  std::shared_ptr<Plane> plane;
  std::shared_ptr<Plane> foreign;
  const auto me = std::lower_bound(ranks.begin(), ranks.end(), rank_);
  if (me != ranks.end() && *me == rank_) {
    plane = std::make_shared<Plane>();
    plane->ranks = ranks;
    plane->backend = source_->make(set, static_cast<int>(me - ranks.begin()));
  } else if (rank_ == 0) {
    foreign = std::make_shared<Plane>();
    foreign->ranks = ranks;
    foreign->backend = source_->make_foreign(set);
  }
  const std::lock_guard lock(mutex_);
  members_[process_set] = std::move(ranks);
  if (plane) planes_[process_set] = std::move(plane);
  if (foreign) foreign_[process_set] = std::move(foreign);
}

void PlaneTable::remove(uint32_t process_set) {
  const std::lock_guard lock(mutex_);
  members_.erase(process_set);
  const auto found = planes_.find(process_set);
  if (found == planes_.end()) return;
  removed_.push_back(found->second);
  planes_.erase(found);
}

std::shared_ptr<Plane> PlaneTable::plane(uint32_t process_set) const {
  const std::lock_guard lock(mutex_);
  const auto found = planes_.find(process_set);
  return found == planes_.end() ? nullptr : found->second;
}

std::vector<int32_t> PlaneTable::members(uint32_t process_set) const {
  const std::lock_guard lock(mutex_);
  const auto found = members_.find(process_set);
  if (found == members_.end()) {
    throw Error(ErrorCode::kInvalidArgument, "there is no process set " + std::to_string(process_set));
  }
  return found->second;
}

void PlaneTable::abort(int rank_or_all) {
  std::vector<std::shared_ptr<Plane>> concerned;
  {
    const std::lock_guard lock(mutex_);
    const auto consider = [&](std::shared_ptr<Plane> plane) {
      if (plane && (rank_or_all == kEverySet || plane->contains(rank_or_all))) concerned.push_back(std::move(plane));
    };
    for (const auto& [id, plane] : planes_) consider(plane);
    for (const auto& removed : removed_) consider(removed.lock());
    for (const auto& [id, foreign] : foreign_) consider(foreign);
  }
  for (const auto& plane : concerned) plane->abort();
}

}  // namespace fusewire
