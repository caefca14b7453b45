// The one place where handles become done, failures become final, and waiting threads are woken.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "common/error.h"
#include "engine/handle.h"

namespace fusewire {

// Lock order: each of the two mutexes is a leaf but for CudaApi; nothing else is called while one is held.
class Completion {
 public:
  // Marks handles done and takes the engine's references, see Note [Who drops a keep-alive].
  void complete(Handle handle, Result result);

  // The first failure is final; later ones are ignored. Returns whether this was the first.
  bool fail(std::shared_ptr<const Error> error);
  std::shared_ptr<const Error> failure() const;  // null while the engine works
  bool failed() const { return failed_.load(std::memory_order_acquire); }

  // On a submitter's thread: drops what completed units kept alive, where nothing on a device uses it any more.
  void drop_retired();
  // Some event has been reached: drop_retired() has a reason to look.
  void look_again() { has_retired_.store(true, std::memory_order_release); }
  // Nobody can tell when a device will be done with what is still kept: it is kept until the process ends.
  void leak_retired() noexcept;

  // Threads that wait but do not drive sleep here. begin(), look once more, then sleep() or cancel().
  struct Ticket {
    uint32_t value;
  };
  Ticket begin_wait();
  bool sleep(Ticket ticket);  // true: interrupted by a signal
  void end_wait();
  bool has_waiters() const { return waiters_.load(std::memory_order_seq_cst) > 0; }
  void notify();  // something completed, or the driver's seat is free

 private:
  std::atomic<uint32_t> event_{0};
  std::atomic<int> waiters_{0};
  std::atomic<bool> failed_{false};
  std::atomic<bool> has_retired_{false};
  mutable std::mutex failure_mutex_;
  std::shared_ptr<const Error> failure_;
  std::mutex retired_mutex_;
  std::vector<Handle> retired_;
  std::deque<Handle> retired_on_device_;  // in the order in which their events will be reached
};

}  // namespace fusewire
