#include "engine/plane_table.h"

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "common/error.h"

namespace fusewire {
namespace {

// A shared-memory plane together with the mapping that it lives in.
class MappedBackend final : public Backend {
 public:
  MappedBackend(SharedMapping mapping, const ShmOptions& options)
      : mapping_(std::move(mapping)), inner_(make_shm_backend(mapping_.data, options)) {}
  std::string_view name() const override { return inner_->name(); }
  void run(const Bucket& bucket) override { inner_->run(bucket); }
  void abort() noexcept override { inner_->abort(); }
  std::vector<int> laggards() const override { return inner_->laggards(); }

 private:
  const SharedMapping mapping_;  // outlives inner_
  const std::unique_ptr<Backend> inner_;
};

}  // namespace

void PlaneTable::add(uint32_t process_set, std::vector<int32_t> ranks) {
  // Ids are never reused, so neither is a region, and a fresh one is zero.
  const int count = static_cast<int>(ranks.size());
  const uint64_t offset = process_set * static_cast<uint64_t>(shm_region_bytes(endpoint_.size()));
  std::shared_ptr<Plane> plane;
  std::optional<Foreign> foreign;
  const auto me = std::lower_bound(ranks.begin(), ranks.end(), endpoint_.rank());
  if (me != ranks.end() && *me == endpoint_.rank()) {
    ShmOptions options = options_;
    options.rank = static_cast<int>(me - ranks.begin());
    options.size = count;
    plane = std::make_shared<Plane>();
    plane->ranks = ranks;
    plane->backend = std::make_unique<MappedBackend>(endpoint_.map_shared(offset, shm_region_bytes(count)), options);
  } else if (endpoint_.rank() == 0) {
    foreign = Foreign{endpoint_.map_shared(offset, shm_region_bytes(count)), ranks};
  }
  const std::lock_guard lock(mutex_);
  members_[process_set] = std::move(ranks);
  if (plane) planes_[process_set] = std::move(plane);
  if (foreign) foreign_[process_set] = std::move(*foreign);
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
  const std::lock_guard lock(mutex_);
  const auto concerned = [rank_or_all](const std::vector<int32_t>& ranks) {
    return rank_or_all == kEverySet || std::binary_search(ranks.begin(), ranks.end(), rank_or_all);
  };
  for (const auto& [id, plane] : planes_) {
    if (concerned(plane->ranks)) plane->backend->abort();
  }
  for (const auto& removed : removed_) {
    const auto plane = removed.lock();
    if (plane && concerned(plane->ranks)) plane->backend->abort();
  }
  for (const auto& [id, foreign] : foreign_) {
    if (concerned(foreign.ranks)) shm_stop(foreign.mapping.data, static_cast<int>(foreign.ranks.size()));
  }
}

}  // namespace fusewire
