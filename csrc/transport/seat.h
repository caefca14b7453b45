// Who drives the engine of one rank, and how others wake that driver. The word lies in memory that the rank's peers
// share, so ringing costs a load while the driver is awake and one futex call when it sleeps.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>

namespace fusewire {

// Note [The driver's seat]
// Exactly one thread drives a rank's engine at a time: the coordinator thread, or a thread that waits for a handle (so
// that the wait costs no hand-over). The seat is one atomic state:
//
//   kIdle          nobody drives; the coordinator thread sleeps and is to be woken when there is work
//   kWoken         nobody drives; the coordinator thread has been woken but does not run yet
//   kCoordinator   the coordinator thread drives
//   kCaller        a waiting caller drives
//   kCallerAsleep  a waiting caller holds the seat but sleeps; it is to be woken when there is work
//
// ring() moves kIdle -> kWoken and kCallerAsleep -> kCaller and wakes that thread; in the other states it does nothing,
// because a driver must look for work once more after it has published kIdle or kCallerAsleep and before it sleeps.
// Both sides do: store what they have to say, full fence, load what the other says (the store-buffer pattern), so at
// least one of them sees the other. `bell` is the futex word; it counts wake-ups.
enum class SeatState : uint32_t { kIdle, kWoken, kCoordinator, kCaller, kCallerAsleep };

struct alignas(128) SeatWord {
  std::atomic<uint32_t> state{0};
  std::atomic<uint32_t> bell{0};
};

class Seat {
 public:
  explicit Seat(SeatWord* word) : word_(word) {}

  // Any thread of any process: "there is something to do here". Call it after the thing is visible.
  void ring();

  // ring() for the case that a peer may have died in the middle of its own ring(), after it had moved the state and
  // before it woke anybody: wakes whoever sleeps, whatever the state says. Costs a system call.
  void alarm();

  // A waiting caller takes the seat unless somebody drives. When it is not given the seat, a driver that works will see
  // what the caller published before; one that sleeps (kCallerAsleep) must still be rung.
  bool take_as_caller() { return take_as(SeatState::kCaller); }
  // The coordinator thread takes the seat unless a caller has it.
  bool take_as_coordinator() { return take_as(SeatState::kCoordinator); }

  // The driver leaves. It must look for work afterwards and ring() when there is some.
  void leave();

  // The driving caller sleeps until rung: announce_sleep(), look for work once more, then sleep() or cancel_sleep().
  uint32_t announce_sleep();
  void cancel_sleep();
  // Returns holding the seat; true when a signal interrupted the sleep.
  bool sleep(uint32_t ticket, std::optional<std::chrono::nanoseconds> timeout);

  // The coordinator thread sleeps until rung. Take the ticket before looking at the seat.
  uint32_t ticket() const;
  void sleep_as_coordinator(uint32_t ticket, std::optional<std::chrono::nanoseconds> timeout);

  SeatState state() const { return static_cast<SeatState>(word_->state.load(std::memory_order_seq_cst)); }

 private:
  bool move(SeatState from, SeatState to);
  bool take_as(SeatState driver);
  SeatWord* word_;
};

}  // namespace fusewire
