// Which process sets exist, and the data plane of each that this rank belongs to.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/executor.h"
#include "engine/plane_source.h"
#include "transport/endpoint.h"

namespace fusewire {

// Thread-safe: the driver adds and removes, the watcher aborts, users ask. Lock order: mutex_ is a leaf; planes are
// aborted outside of it, because one on a GPU takes its time.
class PlaneTable {
 public:
  PlaneTable(const Endpoint& endpoint, std::unique_ptr<PlaneSource> source)
      : rank_(endpoint.rank()), source_(std::move(source)) {}

  void add(uint32_t process_set, std::vector<int32_t> ranks);
  void remove(uint32_t process_set);

  std::string_view name() const { return source_->name(); }
  std::shared_ptr<Plane> plane(uint32_t process_set) const;  // null: not a member, or no such set
  std::vector<int32_t> members(uint32_t process_set) const;  // throws Error(kInvalidArgument)
  void abort(int rank_or_all);                               // sets with that rank; -1: every set
  static constexpr int kEverySet = -1;

 private:
  const int rank_;
  const std::unique_ptr<PlaneSource> source_;
  mutable std::mutex mutex_;
  std::map<uint32_t, std::shared_ptr<Plane>> planes_;
  std::map<uint32_t, std::vector<int32_t>> members_;
  std::vector<std::weak_ptr<Plane>> removed_;  // a bucket may still run on one

  // Rank 0 only: sets that it is not in but must be able to stop, for it alone hears of a rank that died.
  std::map<uint32_t, std::shared_ptr<Plane>> foreign_;
};

}  // namespace fusewire
