#include "transport/seat.h"

#include <climits>

#include "common/futex.h"

namespace fusewire {
namespace {

constexpr uint32_t kCoordinatorBit = 1;
constexpr uint32_t kCallerBit = 2;

}  // namespace

bool Seat::move(SeatState from, SeatState to) {
  auto expected = static_cast<uint32_t>(from);
  return word_->state.compare_exchange_strong(expected, static_cast<uint32_t>(to), std::memory_order_seq_cst);
}

void Seat::ring() {
  // The read-modify-write form of a load: it takes part in the total order of the driver's own exchange, and unlike a
  // stand-alone fence ThreadSanitizer understands it.
  const auto seen = static_cast<SeatState>(word_->state.fetch_or(0, std::memory_order_seq_cst));
  if (seen == SeatState::kIdle && move(SeatState::kIdle, SeatState::kWoken)) {
    word_->bell.fetch_add(1, std::memory_order_seq_cst);
    futex_wake(word_->bell, 1, kCoordinatorBit);
  } else if (seen == SeatState::kCallerAsleep && move(SeatState::kCallerAsleep, SeatState::kCaller)) {
    word_->bell.fetch_add(1, std::memory_order_seq_cst);
    futex_wake(word_->bell, 1, kCallerBit);
  }
}

void Seat::alarm() {
  if (!move(SeatState::kIdle, SeatState::kWoken)) move(SeatState::kCallerAsleep, SeatState::kCaller);
  word_->bell.fetch_add(1, std::memory_order_seq_cst);
  futex_wake(word_->bell, INT_MAX);
}

// A single compare-exchange from each free state is not enough: the state may go kWoken -> kCoordinator -> kIdle
// between the two, and the caller would walk away from a free seat. Starting with a read-modify-write makes a refusal
// as good as ring(): the driver's later exchange sees what was published before it.
bool Seat::take_as(SeatState driver) {
  uint32_t seen = word_->state.fetch_or(0, std::memory_order_seq_cst);
  while (seen == static_cast<uint32_t>(SeatState::kIdle) || seen == static_cast<uint32_t>(SeatState::kWoken)) {
    if (word_->state.compare_exchange_weak(seen, static_cast<uint32_t>(driver), std::memory_order_seq_cst)) return true;
  }
  return false;
}

void Seat::leave() { word_->state.exchange(static_cast<uint32_t>(SeatState::kIdle), std::memory_order_seq_cst); }

uint32_t Seat::announce_sleep() {
  const uint32_t ticket = word_->bell.load(std::memory_order_seq_cst);
  word_->state.exchange(static_cast<uint32_t>(SeatState::kCallerAsleep), std::memory_order_seq_cst);
  return ticket;
}

void Seat::cancel_sleep() { move(SeatState::kCallerAsleep, SeatState::kCaller); }

bool Seat::sleep(uint32_t ticket, std::optional<std::chrono::nanoseconds> timeout) {
  const bool interrupted = state() == SeatState::kCallerAsleep && futex_wait(word_->bell, ticket, timeout, kCallerBit);
  cancel_sleep();
  return interrupted;
}

uint32_t Seat::ticket() const { return word_->bell.load(std::memory_order_seq_cst); }

void Seat::sleep_as_coordinator(uint32_t ticket, std::optional<std::chrono::nanoseconds> timeout) {
  futex_wait(word_->bell, ticket, timeout, kCoordinatorBit);
}

}  // namespace fusewire
