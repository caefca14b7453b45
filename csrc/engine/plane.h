// The data planes of one process set, and who its members are.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "collective/backend.h"

namespace fusewire {

// Note [A plane made late]
// The plane for CUDA tensors is made by whoever runs the set's first bucket of them, and that takes a while: all
// members take part. Meanwhile the watcher may abort the set. What is being made then ends because the set's plane for
// CPU tensors is stopped, over which its members talk. What has just been made is stopped by whichever of put() and
// abort() comes second: each first leaves word of itself and then looks for the other's.
class GpuPlaneSlot {
 public:
  Backend* get() const { return made_.load(std::memory_order_acquire); }  // null: not made yet
  const std::string& why() const { return why_; }                         // it is not NCCL; once get() is not null

  void put(std::unique_ptr<Backend> plane, std::string why) {
    plane_ = std::move(plane);
    why_ = std::move(why);
    made_.store(plane_.get(), std::memory_order_seq_cst);
    if (aborted()) plane_->abort();
  }
  void abort() noexcept {
    aborted_.store(true, std::memory_order_seq_cst);
    if (Backend* const plane = made_.load(std::memory_order_seq_cst)) plane->abort();
  }
  bool aborted() const { return aborted_.load(std::memory_order_seq_cst); }

 private:
  std::unique_ptr<Backend> plane_;
  std::string why_;
  std::atomic<Backend*> made_{nullptr};
  std::atomic<bool> aborted_{false};
};

struct Plane {
  bool contains(int global) const { return std::binary_search(ranks.begin(), ranks.end(), global); }
  // Of a rank in the set, or where it would be.
  int number_of(int global) const {
    return static_cast<int>(std::lower_bound(ranks.begin(), ranks.end(), global) - ranks.begin());
  }
  void abort() noexcept {
    backend->abort();
    gpu.abort();
  }

  std::vector<int32_t> ranks;        // global ranks, sorted
  std::unique_ptr<Backend> backend;  // for CPU tensors
  GpuPlaneSlot gpu;                  // stands on `backend`, so it goes first
};

}  // namespace fusewire
