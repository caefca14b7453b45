// What a submitter holds while its unit is in flight.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "collective/gpu_device.h"
#include "common/error.h"

namespace fusewire {

// What came of a unit.
struct Result {
  std::shared_ptr<const Error> error{};  // null: it worked, and the rest is valid
  std::vector<bool> skipped{};           // empty: none; else per tensor: nobody had it
  uint32_t created_set = 0;
  std::vector<int64_t> extents{};
  SharedEvent event{};  // null: results are there. Else they are when this has been reached
};

// Note [Who drops a keep-alive]
// `keep_alive_` may own a Python object, whose last reference must be dropped under the GIL. So the engine never drops
// it: a Handle that the submitter has let go of before its unit completed is put on the engine's list of retired
// handles, and the list is emptied by the next thread that submits, waits or shuts down (all of them are the user's).
// As "has let go" cannot be asked without a race, every completed handle goes that way.
//
// Note [Done and reached]
// A unit on a GPU is done() when its work has been *launched*. The memory that this work uses is kept until its event
// has been reached, whoever lets go of the handle: a retired handle stays on the list so long.
class HandleState {
 public:
  bool done() const { return done_.load(std::memory_order_seq_cst); }

  // Valid once done().
  bool ok() const { return !result_.error; }
  const std::shared_ptr<const Error>& error() const { return result_.error; }
  const std::vector<bool>& skipped() const { return result_.skipped; }  // empty: none; else per tensor: nobody had it
  uint32_t created_set() const { return result_.created_set; }
  // Allgather, alltoall: for one tensor after the other, how many rows of the result came from each member, in member
  // order (of an alltoall, the received splits). Join: the last rank to join. Else empty.
  const std::vector<int64_t>& extents() const { return result_.extents; }

  // Once done(): see Note [Done and reached]. A user of the results makes his stream wait for it.
  const SharedEvent& event() const { return result_.event; }
  bool reached() const {
    try {
      return !result_.event || result_.event->reached();
    } catch (const Error&) {
      return false;  // nobody knows what still runs: memory that is kept is better than memory that is written to
    }
  }

  // On a thread of the submitter's. Several threads may wait for one handle. Does nothing while !reached().
  void drop_keep_alive() {
    if (!reached()) return;
    if (!dropped_.exchange(true, std::memory_order_acq_rel)) keep_alive_.reset();
  }
  void set_keep_alive(std::shared_ptr<void> owner) { keep_alive_ = std::move(owner); }

  // The engine's side: once, before anybody may see done().
  void finish(Result result) {
    result_ = std::move(result);
    done_.store(true, std::memory_order_seq_cst);
  }

 private:
  std::shared_ptr<void> keep_alive_;
  std::atomic<bool> dropped_{false};
  std::atomic<bool> done_{false};
  Result result_;
};

using Handle = std::shared_ptr<HandleState>;

}  // namespace fusewire
