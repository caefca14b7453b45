#include "engine/completion.h"

#include <climits>
#include <utility>

#include "common/futex.h"

namespace fusewire {

void Completion::complete(Handle handle, Result result) {
  const bool on_device = result.event != nullptr;
  handle->finish(std::move(result));
  const std::lock_guard lock(retired_mutex_);
  if (on_device) {
    retired_on_device_.push_back(std::move(handle));
  } else {
    retired_.push_back(std::move(handle));
  }
  has_retired_.store(true, std::memory_order_release);
}

bool Completion::fail(std::shared_ptr<const Error> error) {
  const std::lock_guard lock(failure_mutex_);
  if (failure_) return false;
  failure_ = std::move(error);
  failed_.store(true, std::memory_order_release);
  return true;
}

std::shared_ptr<const Error> Completion::failure() const {
  if (!failed()) return nullptr;
  const std::lock_guard lock(failure_mutex_);
  return failure_;
}

void Completion::drop_retired() {
  if (!has_retired_.load(std::memory_order_acquire)) return;
  std::vector<Handle> dropped;
  std::vector<Handle> reached;
  {
    const std::lock_guard lock(retired_mutex_);
    has_retired_.store(false, std::memory_order_release);  // first: what is reached from here on is a reason to look
    dropped.swap(retired_);
    while (!retired_on_device_.empty()) {
      Handle& oldest = retired_on_device_.front();
      const bool asked = !reached.empty() && reached.back()->event() == oldest->event();  // of one bucket
      if (!asked && !oldest->reached()) break;
      reached.push_back(std::move(oldest));
      retired_on_device_.pop_front();
    }
  }
  for (const Handle& handle : reached) handle->drop_keep_alive();  // somebody may hold on to the handle itself
}

void Completion::leak_retired() noexcept {
  const std::lock_guard lock(retired_mutex_);
  for (Handle& handle : retired_on_device_) static_cast<void>(std::make_unique<Handle>(std::move(handle)).release());
  retired_on_device_.clear();
}

Completion::Ticket Completion::begin_wait() {
  waiters_.fetch_add(1, std::memory_order_seq_cst);
  return {event_.load(std::memory_order_seq_cst)};
}

bool Completion::sleep(Ticket ticket) { return futex_wait(event_, ticket.value); }

void Completion::end_wait() { waiters_.fetch_sub(1, std::memory_order_seq_cst); }

void Completion::notify() {
  if (!has_waiters()) return;
  event_.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(event_, INT_MAX);
}

}  // namespace fusewire
