// The driver's seat: no wake-up is lost, however ringers, callers and the coordinator interleave.
#include "transport/seat.h"

#include <gtest/gtest.h>

#include <random>
#include <thread>
#include <vector>

#include "common/futex.h"

namespace fusewire {
namespace {

// Work that somebody has published and a driver must take. `open` plays the queue, `done` the completions.
struct Desk {
  SeatWord word;
  Seat seat{&word};
  std::atomic<uint64_t> open{0};
  std::atomic<uint64_t> done{0};
  std::atomic<bool> stop{false};

  bool has_work() const { return open.load(std::memory_order_acquire) != done.load(std::memory_order_acquire); }
  void work() {
    // Only the driver adds to `done`; two at once would be seen as a wrong sum.
    const uint64_t seen = open.load(std::memory_order_acquire);
    done.store(seen, std::memory_order_release);
  }
  void leave() {
    seat.leave();
    if (has_work()) seat.ring();
  }
};

void coordinate(Desk& desk) {
  while (!desk.stop) {
    const uint32_t ticket = desk.seat.ticket();
    if (desk.has_work() && desk.seat.take_as_coordinator()) {
      desk.work();
      desk.leave();
    } else if (!desk.stop) {
      desk.seat.sleep_as_coordinator(ticket, std::nullopt);
      // Woken: nobody else will come.
      if (desk.seat.take_as_coordinator()) {
        desk.work();
        desk.leave();
      }
    }
  }
}

void finish(Desk& desk, std::thread& coordinator) {
  desk.stop = true;
  desk.seat.alarm();
  coordinator.join();
}

// Each item is waited for before the next is published, so every lost wake-up hangs.
TEST(Seat, TheSleepingCoordinatorSeesEveryItem) {
  Desk desk;
  std::thread coordinator([&] { coordinate(desk); });
  std::mt19937 random(1);
  for (uint64_t i = 1; i <= 20000; ++i) {
    desk.open.store(i, std::memory_order_release);
    desk.seat.ring();
    while (desk.done.load(std::memory_order_acquire) != i) {
      if (random() % 8 == 0) std::this_thread::yield();
    }
    for (unsigned spin = random() % 200; spin > 0; --spin) cpu_relax();
  }
  finish(desk, coordinator);
}

// A caller sits in the seat and sleeps; a peer publishes and rings.
TEST(Seat, TheSleepingCallerSeesEveryItem) {
  Desk desk;
  constexpr uint64_t kItems = 20000;
  std::thread caller([&] {
    ASSERT_TRUE(desk.seat.take_as_caller());
    while (desk.done.load() < kItems) {
      desk.work();
      const uint32_t ticket = desk.seat.announce_sleep();
      if (desk.has_work() || desk.done.load() == kItems) {
        desk.seat.cancel_sleep();
      } else {
        desk.seat.sleep(ticket, std::nullopt);
      }
      ASSERT_EQ(desk.seat.state(), SeatState::kCaller);
    }
    desk.seat.leave();
  });
  std::mt19937 random(2);
  for (uint64_t i = 1; i <= kItems; ++i) {
    desk.open.store(i, std::memory_order_release);
    desk.seat.ring();
    while (desk.done.load(std::memory_order_acquire) != i) {
      if (random() % 8 == 0) std::this_thread::yield();
    }
    for (unsigned spin = random() % 200; spin > 0; --spin) cpu_relax();
  }
  caller.join();
  EXPECT_EQ(desk.seat.state(), SeatState::kIdle);
}

// Everybody at once: submitters that take the seat when they can and otherwise rely on whoever has it, ringers from
// outside, and the coordinator. Two drivers at a time would show in `driving`.
TEST(Seat, OneDriverAtATimeAndNothingForgotten) {
  constexpr int kThreads = 4;
  constexpr int kItems = 3000;
  SeatWord word;
  Seat seat(&word);
  std::atomic<uint64_t> open{0};
  std::atomic<uint64_t> done{0};
  std::atomic<int> driving{0};
  std::atomic<bool> stop{false};
  const auto has_work = [&] { return open.load() > done.load(); };
  const auto drive = [&] {
    ASSERT_EQ(driving.fetch_add(1), 0);
    done.store(open.load());
    ASSERT_EQ(driving.fetch_sub(1), 1);
  };
  const auto leave = [&] {
    seat.leave();
    if (has_work()) seat.ring();
  };
  std::thread coordinator([&] {
    while (!stop) {
      const uint32_t ticket = seat.ticket();
      if (seat.take_as_coordinator()) {
        drive();
        leave();
      }
      if (!stop) seat.sleep_as_coordinator(ticket, std::nullopt);
    }
  });
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937 random(t);
      for (int i = 0; i < kItems; ++i) {
        const uint64_t mine = open.fetch_add(1) + 1;
        const bool seated = random() % 2 == 0 && seat.take_as_caller();
        if (seated) {
          drive();
          if (random() % 2 == 0) {
            const uint32_t ticket = seat.announce_sleep();
            if (has_work() || random() % 2 == 0) {
              seat.cancel_sleep();
            } else {
              seat.sleep(ticket, std::chrono::microseconds(50));
            }
            drive();
          }
          leave();
        } else {
          seat.ring();
        }
        while (done.load() < mine) std::this_thread::yield();
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT_EQ(done.load(), uint64_t{kThreads} * kItems);
  stop = true;
  seat.alarm();
  coordinator.join();
}

TEST(Seat, RefusesWhileSomebodyDrives) {
  SeatWord word;
  Seat seat(&word);
  ASSERT_TRUE(seat.take_as_caller());
  EXPECT_FALSE(seat.take_as_caller());
  EXPECT_FALSE(seat.take_as_coordinator());
  seat.ring();
  EXPECT_EQ(seat.state(), SeatState::kCaller) << "who drives is not disturbed";
  seat.leave();
  seat.ring();
  EXPECT_EQ(seat.state(), SeatState::kWoken);
  seat.ring();
  EXPECT_EQ(seat.state(), SeatState::kWoken);
  ASSERT_TRUE(seat.take_as_caller()) << "a caller may be faster than the coordinator that was woken";
  const uint32_t ticket = seat.announce_sleep();
  EXPECT_EQ(seat.state(), SeatState::kCallerAsleep);
  EXPECT_FALSE(seat.take_as_caller());
  EXPECT_FALSE(seat.take_as_coordinator());
  seat.ring();
  EXPECT_EQ(seat.state(), SeatState::kCaller);
  seat.sleep(ticket, std::nullopt);  // returns at once: it was rung
  seat.leave();
}

TEST(Seat, ATimeOutKeepsTheSeat) {
  SeatWord word;
  Seat seat(&word);
  ASSERT_TRUE(seat.take_as_caller());
  seat.sleep(seat.announce_sleep(), std::chrono::microseconds(200));
  EXPECT_EQ(seat.state(), SeatState::kCaller);
  seat.sleep(seat.announce_sleep(), std::chrono::nanoseconds(-5));
  EXPECT_EQ(seat.state(), SeatState::kCaller);
}

// A peer killed between moving the state and waking leaves the seat in kWoken (or kCaller) with everybody asleep.
TEST(Seat, AlarmWakesWhomADeadRingerForgot) {
  for (const bool caller : {false, true}) {
    SeatWord word;
    Seat seat(&word);
    std::atomic<bool> awake{false};
    std::thread sleeper([&] {
      if (caller) {
        ASSERT_TRUE(seat.take_as_caller());
        seat.sleep(seat.announce_sleep(), std::nullopt);
      } else {
        // Until the bell has rung: a spurious return of the futex must not pass for the alarm.
        const uint32_t ticket = seat.ticket();
        while (seat.ticket() == ticket) seat.sleep_as_coordinator(ticket, std::nullopt);
      }
      awake = true;
    });
    if (caller) {
      while (seat.state() != SeatState::kCallerAsleep) std::this_thread::yield();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    word.state.store(static_cast<uint32_t>(caller ? SeatState::kCaller : SeatState::kWoken));
    seat.ring();
    seat.alarm();
    sleeper.join();
    EXPECT_TRUE(awake);
  }
}

TEST(Futex, VeryLongTimeoutsDoNotOverflow) {
  std::atomic<uint32_t> word{1};
  futex_wait(word, 0, std::chrono::nanoseconds::max());  // the value differs: returns at once
  std::thread waker([&] {
    while (word.load() != 2) futex_wake(word, 1);
  });
  for (int i = 0; i < 3; ++i)
    futex_wait(word, 1, i == 2 ? std::chrono::nanoseconds::max() : std::chrono::nanoseconds(1000));
  word = 2;
  waker.join();
}

}  // namespace
}  // namespace fusewire
