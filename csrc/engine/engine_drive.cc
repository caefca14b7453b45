// Who drives the engine: see Note [The driver's seat] in transport/seat.h.
#include <algorithm>
#include <chrono>

#include "engine/engine_impl.h"

namespace fusewire {
namespace {

using Clock = std::chrono::steady_clock;

int64_t nanoseconds_at(std::optional<std::chrono::nanoseconds> from_now, int64_t never) {
  if (!from_now) return never;
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count() +
         from_now->count();
}

}  // namespace

void Engine::Impl::wait(const HandleState& handle, const std::function<void()>& on_signal) {
  while (!handle.done()) {
    if (forked()) check_usable();
    if (seat_.take_as_caller()) {
      drive(handle, on_signal);
      continue;
    }
    // Somebody else drives. The coordinator thread gives way when it sees a waiter; another caller finishes its own
    // wait first, and completes ours on the way or leaves the seat. It may sleep, and not know of our submission yet.
    const Completion::Ticket ticket = completion_.begin_wait();
    seat_.ring();
    bool interrupted = false;
    if (!handle.done() && seat_.state() != SeatState::kIdle && seat_.state() != SeatState::kWoken) {
      interrupted = completion_.sleep(ticket);
    }
    completion_.end_wait();
    // The driver may have left the seat to us although we do not need it any more: then the work is still there.
    if ((interrupted || handle.done()) && has_work()) seat_.ring();
    if (interrupted && on_signal) on_signal();
  }
}

// Holds the seat until the handle is done.
void Engine::Impl::drive(const HandleState& handle, const std::function<void()>& on_signal) {
  bool interrupted = false;
  const Interruption inside(on_signal, endpoint_->rank());  // of a bucket
  while (!handle.done() && !interrupted && !inside.error()) {
    if (closed_.load(std::memory_order_seq_cst)) {
      progress_.close(completion_.failure());  // submitted while shutdown() was at work
      break;
    }
    if (closing_.load(std::memory_order_seq_cst)) break;
    bool worked = progress_.step();
    worked |= run_inline(inside);
    if (worked || handle.done() || spin(handle)) continue;

    const auto timeout = progress_.time_to_deadline();
    const uint32_t ticket = seat_.announce_sleep();
    if (handle.done() || has_work() || closing_.load(std::memory_order_seq_cst)) {
      seat_.cancel_sleep();
      continue;
    }
    interrupted = seat_.sleep(ticket, timeout);
  }
  leave_seat();
  if (inside.error()) inside.rethrow();
  if (interrupted && on_signal) on_signal();
  if (closing_.load(std::memory_order_seq_cst) && !handle.done()) {
    // shutdown() fails every handle as soon as it has the seat.
    const Completion::Ticket ticket = completion_.begin_wait();
    if (!handle.done()) completion_.sleep(ticket);
    completion_.end_wait();
  }
}

// Note [Inline buckets]. A driver that runs a bucket sends nothing meanwhile, so it must not run one while a peer may
// still lack the rest of the very response that starts it: then the executor thread does.
bool Engine::Impl::run_inline(const Interruption& interruption) {
  if (!executor_.has_runnable()) return false;
  if (!endpoint_->has_unsent()) {
    if (watched_every_ && armed_until_.load(std::memory_order_relaxed) == kNever) {
      armed_until_.store(0, std::memory_order_seq_cst);
      seat_.alarm();
    }
    const Loan loan(loan_);
    return executor_.run_one(&interruption);
  }
  executor_.hand_over();
  return false;
}

// Looks for work for a short while; true when there is some.
bool Engine::Impl::spin(const HandleState& handle) {
  if (spin_.count() == 0) return false;
  const auto until = Clock::now() + spin_;
  do {
    for (int i = 0; i < 32; ++i) {
      if (has_work() || handle.done()) return true;
      cpu_relax();
    }
  } while (Clock::now() < until);
  return false;
}

void Engine::Impl::leave_seat() {
  // The last bucket's completion is passed on here, so that a synchronous call need not wake the coordinator thread.
  if (!closing_.load(std::memory_order_seq_cst)) progress_.step();
  const int64_t deadline = nanoseconds_at(progress_.time_to_deadline(), kNever);
  seat_.leave();
  completion_.notify();
  if (has_work() || deadline < armed_until_.load(std::memory_order_seq_cst)) seat_.ring();
}

void Engine::Impl::coordinate() {
  while (!closed_.load(std::memory_order_seq_cst)) {
    const uint32_t ticket = seat_.ticket();
    std::optional<std::chrono::nanoseconds> timeout;
    armed_until_.store(kNever, std::memory_order_seq_cst);
    if (!closing_.load(std::memory_order_seq_cst) && seat_.take_as_coordinator()) {
      // Note [Inline buckets]
      while (!completion_.has_waiters() && !closing_.load(std::memory_order_seq_cst) &&
             (progress_.step() || (!endpoint_->has_unsent() && executor_.run_one_if(config_.inline_limit)))) {
      }
      executor_.hand_over();
      timeout = progress_.time_to_deadline();
      armed_until_.store(nanoseconds_at(timeout, kNever), std::memory_order_seq_cst);
      seat_.leave();
      completion_.notify();
      if (!completion_.has_waiters() && progress_.has_work()) continue;
    } else if (watched_every_ && !closing_.load(std::memory_order_seq_cst)) {
      timeout = look_in();
      armed_until_.store(nanoseconds_at(timeout, kNever), std::memory_order_seq_cst);
    }
    if (closed_.load(std::memory_order_seq_cst)) break;
    seat_.sleep_as_coordinator(ticket, timeout);
  }
}

// See Note [Lent progress]. Returns how long to sleep.
std::optional<std::chrono::nanoseconds> Engine::Impl::look_in() {
  std::chrono::nanoseconds sleep = *watched_every_;
  uint32_t state = kOffered;
  if (!loan_.compare_exchange_strong(state, kBorrowed, std::memory_order_acquire)) return sleep;
  while (progress_.step()) {
  }
  if (const auto due = progress_.time_to_deadline()) sleep = std::min(sleep, *due);
  loan_.store(kOffered, std::memory_order_release);
  futex_wake(loan_, 1);
  return sleep;
}

void Engine::Impl::on_departure(const Departure& departure) {
  // A bucket that runs may be waiting for memory that nobody will write any more. If nothing runs, nobody is disturbed.
  // The driver is told first: either it knows before it starts the next bucket, or that bucket is seen here.
  progress_.departed(departure);
  if (!departure.clean && executor_.busy()) planes_.abort(departure.rank);
  seat_.ring();
}

}  // namespace fusewire
