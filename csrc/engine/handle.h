// What a submitter holds while its unit is in flight.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "common/error.h"

namespace fusewire {

// Note [Who drops a keep-alive]
// `keep_alive_` may own a Python object, whose last reference must be dropped under the GIL. So the engine never drops
// it: a Handle that the submitter has let go of before its unit completed is put on the engine's list of retired
// handles, and the list is emptied by the next thread that submits, waits or shuts down (all of them are the user's).
// As "has let go" cannot be asked without a race, every completed handle goes that way.
class HandleState {
 public:
  bool done() const { return done_.load(std::memory_order_seq_cst); }

  // Valid once done().
  bool ok() const { return !error_; }
  const std::shared_ptr<const Error>& error() const { return error_; }
  const std::vector<bool>& skipped() const { return skipped_; }  // empty: none; else per tensor: nobody had it
  uint32_t created_set() const { return created_set_; }
  // What every member brought: see Note [Extents] in control/message.h. kJoin: one number, the last rank to join.
  const std::vector<int64_t>& extents() const { return extents_; }

  // On a thread of the submitter's. Several threads may wait for one handle.
  void drop_keep_alive() {
    if (!dropped_.exchange(true, std::memory_order_acq_rel)) keep_alive_.reset();
  }
  void set_keep_alive(std::shared_ptr<void> owner) { keep_alive_ = std::move(owner); }

  // The engine's side: once, before anybody may see done().
  void finish(std::shared_ptr<const Error> error, std::vector<bool> skipped, uint32_t created_set,
              std::vector<int64_t> extents = {}) {
    error_ = std::move(error);
    skipped_ = std::move(skipped);
    created_set_ = created_set;
    extents_ = std::move(extents);
    done_.store(true, std::memory_order_seq_cst);
  }

 private:
  std::shared_ptr<void> keep_alive_;
  std::atomic<bool> dropped_{false};
  std::atomic<bool> done_{false};
  std::shared_ptr<const Error> error_;
  std::vector<bool> skipped_;
  uint32_t created_set_ = 0;
  std::vector<int64_t> extents_;
};

using Handle = std::shared_ptr<HandleState>;

}  // namespace fusewire
