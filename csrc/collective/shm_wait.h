// How ranks tell each other how far they are, and how one waits for the others: a short spin, then a futex.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <vector>

#include "collective/shm_region.h"
#include "collective/signal_gate.h"
#include "common/chunk_trace.h"
#include "common/error.h"

namespace fusewire {

// Note [Waking sleepers]
// A publisher must make no system call unless somebody sleeps, and a sleeper must be woken once, when ALL it waits for
// has happened (where ranks outnumber cores every useless wake-up is two context switches). So a sleeper writes down
// what it waits for, and each publisher, after it has published, looks whether that is fulfilled now.
//
//   publisher:  reached = chunk;  if (sleeping != 0)  for every rank asleep: fulfilled? -> asleep: 1 -> 0, wake it
//   sleeper:    write the condition;  ++sleeping;  asleep = 1;  fulfilled? -> do not sleep;  else futex_wait(asleep, 1)
//
// The stores and loads are sequentially consistent. If the publisher does not see the sleeper, its store came before
// the sleeper's last look, which sees it. Of two publishers the later one in the total order sees both stores. A
// publisher that reads a condition while its rank goes from one sleep to the next may judge wrongly: a needless wake-up
// makes the sleeper look again, and a missed one cannot matter, for the new sleep's last look comes after that
// publisher's store. An abort stores the abort word and wakes everybody; the same argument holds.

class ShmWaiter {
 public:
  ShmWaiter(ShmRegion region, int rank, std::chrono::nanoseconds spin, std::chrono::nanoseconds abort_after);

  // Is told of waits that do not end at once; must outlive the waiter.
  void tell(ChunkStopwatch* watch) { watch_ = watch; }

  // Is told of signals that cut a sleep short.
  SignalGate& signals() { return signals_; }

  // Everything this rank wrote before is visible to whoever sees `chunk`.
  void publish(ShmStage stage, int64_t chunk);

  // Publishes without looking for sleepers: a publish() of this thread must follow.
  void note(ShmStage stage, int64_t chunk);

  // Until every other rank has published `chunk` (or a later one). Throws what stop() was called with, on any rank;
  // kStalled when it takes longer than `abort_after`, which stops every rank.
  void wait_all(ShmStage stage, int64_t chunk) { wait(0, region_.size(), stage, chunk, spin_); }
  void wait_for(int peer, ShmStage stage, int64_t chunk) { wait(peer, peer + 1, stage, chunk, spin_); }

  // wait_all() for ranks that are at work on it: a sleep (where sleeping is not all there is) begins only after as long
  // as moving `bytes` may take.
  void wait_for_copies(ShmStage stage, int64_t chunk, size_t bytes);

  // Makes every rank's wait, in progress or to come, throw an Error with this code and rank. The first call counts.
  // Thread-safe.
  void stop(ErrorCode code, int rank) noexcept;
  void throw_if_stopped() const;

  // Ranks that the wait in progress waits for; empty when there is none. Thread-safe.
  std::vector<int> laggards() const;

 private:
  bool fulfilled(int first, int last, ShmStage stage, int64_t chunk);
  void wait(int first, int last, ShmStage stage, int64_t chunk, std::chrono::nanoseconds spin);
  void wait_slowly(int first, int last, ShmStage stage, int64_t chunk, std::chrono::nanoseconds spin);
  void sleep(int first, int last, ShmStage stage, int64_t chunk, std::chrono::nanoseconds limit);
  void wake_fulfilled();
  std::vector<int> behind(int first, int last, ShmStage stage, int64_t chunk) const;
  [[noreturn]] void give_up(const std::vector<int>& late);

  ShmRegion region_;
  int rank_;
  ChunkStopwatch* watch_ = nullptr;
  SignalGate signals_;
  std::chrono::nanoseconds spin_;
  std::chrono::nanoseconds abort_after_;
  std::vector<int64_t> seen_;         // [rank * kShmStages + stage]: the last value read, to leave the line alone
  std::atomic<bool> waiting_{false};  // laggards() may read this rank's own ShmSleeper
};

}  // namespace fusewire
