// Aborts, time-outs and faults of one rank must reach all, soon, and stay.
#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <thread>

#include "collective/peer_memory.h"
#include "collective/shm_region.h"
#include "collective/shm_wait.h"
#include "common/error.h"
#include "shm_world.h"
#include "signalled.h"

namespace fusewire::testing {
namespace {

using namespace std::chrono_literals;

struct Outcome {
  ErrorCode code = ErrorCode::kInvalidType;  // "did not throw"
  int rank = -2;
};

Outcome outcome_of(const std::function<void()>& work) {
  try {
    work();
  } catch (const Error& error) {
    return {error.code(), error.rank()};
  }
  return {};
}

class Data {
 public:
  explicit Data(size_t count) : values_(count, 1.0f) {
    const TensorView view = contiguous_view(values_.data(), DataType::kFloat32, {static_cast<int64_t>(count)});
    bucket.segments = {{view, view}};
    bucket.elements = static_cast<int64_t>(count);
  }
  Bucket bucket;

 private:
  std::vector<float> values_;
};

std::vector<std::unique_ptr<Backend>> make_set(HeapRegion& region, int size, std::chrono::microseconds spin,
                                               std::chrono::nanoseconds abort_after = {}) {
  std::vector<std::unique_ptr<Backend>> set;
  for (int rank = 0; rank < size; ++rank) {
    set.push_back(make_shm_backend(region.data(), {rank, size, 0, spin, abort_after}));
  }
  return set;
}

// Ranks 0 and 2 wait for rank 1, which never comes. laggards() names it; an abort on it frees them.
TEST(ShmFailure, AbortReachesSleepersAndStays) {
  for (const size_t count : {size_t{1}, size_t{1} << 20}) {
    HeapRegion region(shm_region_bytes(3));
    const auto set = make_set(region, 3, 10us);
    Outcome outcomes[3];
    std::vector<std::thread> threads;
    for (const int rank : {0, 2}) {
      threads.emplace_back([&, rank] {
        Data data(count);
        outcomes[rank] = outcome_of([&] { set[static_cast<size_t>(rank)]->run(data.bucket); });
      });
    }
    for (const size_t rank : {size_t{0}, size_t{2}}) {
      while (set[rank]->laggards() != std::vector<int>{1}) std::this_thread::sleep_for(1ms);
    }
    set[1]->abort();
    for (std::thread& thread : threads) thread.join();
    EXPECT_EQ(outcomes[0].code, ErrorCode::kPeerLost);
    EXPECT_EQ(outcomes[2].code, ErrorCode::kPeerLost);
    Data data(count);
    for (const auto& backend : set) {
      EXPECT_EQ(outcome_of([&] { backend->run(data.bucket); }).code, ErrorCode::kPeerLost);
      EXPECT_TRUE(backend->laggards().empty());
    }
  }
}

TEST(ShmFailure, TimeoutNamesTheLateRankEverywhere) {
  HeapRegion region(shm_region_bytes(3));
  const auto set = make_set(region, 3, 0us, 50ms);
  Outcome outcomes[3];
  std::vector<std::thread> threads;
  for (const int rank : {0, 1}) {
    threads.emplace_back([&, rank] {
      Data data(10);
      outcomes[rank] = outcome_of([&] { set[static_cast<size_t>(rank)]->run(data.bucket); });
    });
  }
  for (std::thread& thread : threads) thread.join();
  Data data(10);
  outcomes[2] = outcome_of([&] { set[2]->run(data.bucket); });
  for (const Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.code, ErrorCode::kStalled);
    EXPECT_EQ(outcome.rank, 2);
  }
}

// A rank that cannot even start must not leave the others waiting.
TEST(ShmFailure, AFaultOnOneRankFailsAll) {
  HeapRegion region(shm_region_bytes(2));
  const auto set = make_set(region, 2, 0us);
  Outcome waiting;
  std::thread other([&] {
    Data data(100);
    waiting = outcome_of([&] { set[0]->run(data.bucket); });
  });
  Data data(100);
  data.bucket.elements = 99;
  EXPECT_EQ(outcome_of([&] { set[1]->run(data.bucket); }).code, ErrorCode::kInternal);
  other.join();
  EXPECT_EQ(waiting.code, ErrorCode::kInternal);
  EXPECT_EQ(waiting.rank, 1);
}

// What only its owner can read, as memory that a device's driver has mapped.
struct Unreadable {
  explicit Unreadable(const std::vector<float>& memory) {
    begin = reinterpret_cast<const std::byte*>(memory.data());
    end = begin + memory.size() * sizeof(float);
    calls = 0;
    PeerMemory::set_call([](pid_t pid, const iovec* to, unsigned long to_count, const iovec* from,
                            unsigned long from_count, unsigned long flags) {
      ++calls;
      for (unsigned long i = 0; i < from_count; ++i) {
        if (begin <= from[i].iov_base && from[i].iov_base < end) return ssize_t{-1};
      }
      return ::process_vm_readv(pid, to, to_count, from, from_count, flags);
    });
  }
  ~Unreadable() { PeerMemory::set_call(::process_vm_readv); }
  static inline const std::byte* begin;
  static inline const std::byte* end;
  static inline std::atomic<int> calls;
};

// All ranks go back to slots in the middle of the exchange, also those that could read everything, and stay there.
TEST(ShmFailure, MemoryThatCannotBeReadGoesThroughSlots) {
  constexpr int kRanks = 3;
  constexpr int64_t kCount = 1 << 16;
  std::vector<std::vector<float>> inputs;
  for (int rank = 0; rank < kRanks; ++rank) inputs.emplace_back(kCount, static_cast<float>(rank + 1));
  const Unreadable unreadable(inputs[1]);
  HeapRegion region(shm_region_bytes(kRanks));
  std::barrier together(kRanks);
  std::atomic<int> calls_of_first{0};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const std::vector<float>& mine = inputs[static_cast<size_t>(rank)];
      ShmOptions options{rank, kRanks, 0, 0us, {}};
      options.direct_bytes = 1;
      const auto backend = make_shm_backend(region.data(), options);
      for (int round = 0; round < 3; ++round) {
        std::vector<float> result(kRanks * kCount);
        Bucket bucket;
        bucket.kind = OpKind::kAllgather;
        bucket.elements = kCount;
        // Rank 2 wants no result, so it reads nothing.
        bucket.segments = {{contiguous_view(const_cast<float*>(mine.data()), DataType::kFloat32, {kCount}),
                            contiguous_view(rank == 2 ? nullptr : result.data(), DataType::kFloat32, {kRanks * kCount}),
                            std::vector<int64_t>(kRanks, kCount)}};
        backend->run(bucket);
        size_t wrong = 0;
        for (size_t i = 0; rank != 2 && i < result.size(); ++i) {
          if (result[i] != static_cast<float>(i / kCount + 1)) ++wrong;
        }
        EXPECT_EQ(wrong, 0u) << "round " << round << ", rank " << rank;
        together.arrive_and_wait();
        if (round == 0) calls_of_first = Unreadable::calls.load();
        together.arrive_and_wait();
        EXPECT_EQ(Unreadable::calls, calls_of_first) << "nobody tries again";
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_GT(calls_of_first, 0);
}

// What the handler of a signal throws ends the wait, and the plane on all ranks; one that returns changes nothing.
TEST(ShmFailure, ASignalMayEndAWait) {
  for (const bool throws : {false, true}) {
    HeapRegion region(shm_region_bytes(2));
    const auto set = make_set(region, 2, 0us);
    std::atomic<int> asked{0};
    const std::function<void()> on_signal = [&] {
      ++asked;
      if (throws) throw Error(ErrorCode::kPeerLost, "interrupted", 0);
    };
    Outcome waiting;
    std::thread waiter([&] {
      Data data(100);
      data.bucket.on_signal = &on_signal;
      waiting = outcome_of([&] { set[0]->run(data.bucket); });
    });
    signal_until(waiter.native_handle(), [&] { return asked > 0; });
    if (throws) waiter.join();
    Data data(100);
    const Outcome other = outcome_of([&] { set[1]->run(data.bucket); });
    if (!throws) waiter.join();
    EXPECT_EQ(waiting.code, throws ? ErrorCode::kPeerLost : Outcome().code);
    EXPECT_EQ(other.code, throws ? ErrorCode::kPeerLost : Outcome().code);
    EXPECT_EQ(other.rank, throws ? 0 : Outcome().rank);
  }
}

// A killed process's peers sleep until somebody who knows of its death aborts.
#if !defined(__SANITIZE_THREAD__)
TEST(ShmFailure, AbortFreesThePeersOfAKilledProcess) {
  SharedPages region(shm_region_bytes(2));
  const pid_t victim = fork();
  if (victim == 0) {
    Data data(1 << 22);
    const auto backend = make_shm_backend(region.data(), {1, 2, 0, 0us, {}});
    for (;;) backend->run(data.bucket);
  }
  const auto backend = make_shm_backend(region.data(), {0, 2, 0, 0us, {}});
  Data data(1 << 22);
  for (int i = 0; i < 3; ++i) backend->run(data.bucket);
  kill(victim, SIGKILL);
  int status = 0;
  waitpid(victim, &status, 0);
  Outcome outcome;
  std::thread waiting([&] {
    outcome = outcome_of([&] {
      for (;;) backend->run(data.bucket);
    });
  });
  while (backend->laggards() != std::vector<int>{1}) std::this_thread::sleep_for(1ms);
  backend->abort();
  waiting.join();
  EXPECT_EQ(outcome.code, ErrorCode::kPeerLost);
}
#endif

// Tens of thousands of rendezvous among more threads than cores: a single lost wake-up would hang here.
TEST(ShmWaiter, NoWakeUpIsLost) {
  constexpr int kRanks = 6;
  constexpr int64_t kRounds = 10'000;
  for (const auto spin : {0us, 2us}) {
    HeapRegion memory(shm_region_bytes(kRanks));
    const ShmRegion region(memory.data(), kRanks);
    std::atomic<int64_t> inside{0};
    std::atomic<bool> torn{false};
    std::vector<std::thread> threads;
    for (int rank = 0; rank < kRanks; ++rank) {
      threads.emplace_back([&, rank] {
        ShmWaiter waiter(region, rank, spin, {});
        for (int64_t round = 1; round <= kRounds; ++round) {
          inside.fetch_add(1);
          waiter.publish(ShmStage::kPacked, round);
          waiter.wait_all(ShmStage::kPacked, round);
          if (inside.load() < round * kRanks) torn = true;
          if (round % 3 == rank % 3) waiter.note(ShmStage::kCopied, round);
          waiter.publish(ShmStage::kReduced, round);
          waiter.wait_for((rank + 1) % kRanks, ShmStage::kReduced, round);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    EXPECT_FALSE(torn);
  }
}

}  // namespace
}  // namespace fusewire::testing
