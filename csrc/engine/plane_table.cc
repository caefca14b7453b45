#include "engine/plane_table.h"

#include <algorithm>
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

bool contains(const std::vector<int32_t>& ranks, int rank) {
  return std::binary_search(ranks.begin(), ranks.end(), rank);
}

}  // namespace

void PlaneTable::add(uint32_t process_set, std::vector<int32_t> ranks) {
  std::shared_ptr<Plane> plane;
  const auto me = std::lower_bound(ranks.begin(), ranks.end(), endpoint_.rank());
  if (me != ranks.end() && *me == endpoint_.rank()) {
    ShmOptions options = options_;
    options.rank = static_cast<int>(me - ranks.begin());
    options.size = static_cast<int>(ranks.size());
    // Ids are never reused, so neither is a region, and a fresh one is zero.
    const uint64_t stride = shm_region_bytes(endpoint_.size());
    plane = std::make_shared<Plane>();
    plane->ranks = ranks;
    plane->backend = std::make_unique<MappedBackend>(
        endpoint_.map_shared(process_set * stride, shm_region_bytes(options.size)), options);
  }
  const std::lock_guard lock(mutex_);
  members_[process_set] = std::move(ranks);
  if (plane) planes_[process_set] = std::move(plane);
}

void PlaneTable::remove(uint32_t process_set) {
  const std::lock_guard lock(mutex_);
  members_.erase(process_set);
  planes_.erase(process_set);
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
  for (const auto& [id, plane] : planes_) {
    if (rank_or_all == kEverySet || contains(plane->ranks, rank_or_all)) plane->backend->abort();
  }
}

}  // namespace fusewire
