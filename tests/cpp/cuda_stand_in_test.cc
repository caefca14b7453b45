// The stand-in itself: it must show what a GPU would show, and stop at what a GPU leaves undefined.
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <thread>
#include <vector>

#include "simt/stand_in.h"

namespace fusewire::simt {
namespace {

TEST(StandIn, EveryThreadOfTheGridRunsOnce) {
  std::vector<int> runs(5 * 70);
  launch(5, 70, [&] {
    EXPECT_EQ(gridDim.x, 5u);
    EXPECT_EQ(blockDim.x, 70u);
    ++runs[blockIdx.x * blockDim.x + threadIdx.x];
  });
  EXPECT_EQ(runs, std::vector<int>(5 * 70, 1));
}

TEST(StandIn, BarriersSeparateWritesFromReads) {
  std::vector<unsigned> shared(64);
  std::vector<unsigned> seen(64);
  for (uint64_t s = 0; s < 20; ++s) {
    seed(s);
    launch(3, 64, [&] {
      shared[threadIdx.x] = 100 * blockIdx.x + threadIdx.x;
      __syncthreads();
      seen[threadIdx.x] = shared[63 - threadIdx.x];
      __syncthreads();
      shared[threadIdx.x] = 7777;
    });
    EXPECT_EQ(seen[1] % 100, 62u);
  }
}

TEST(StandIn, AMissingBarrierShows) {
  std::set<std::vector<unsigned>> outcomes;
  for (uint64_t s = 0; s < 8; ++s) {
    seed(s);
    std::vector<unsigned> shared(64);
    std::vector<unsigned> seen(64);
    launch(1, 64, [&] {
      shared[threadIdx.x] = threadIdx.x + 1;
      seen[threadIdx.x] = shared[63 - threadIdx.x];
    });
    outcomes.insert(seen);
  }
  EXPECT_GT(outcomes.size(), 1u);
}

TEST(StandIn, AMissingWarpBarrierShows) {
  std::set<unsigned> outcomes;
  for (uint64_t s = 0; s < 16; ++s) {
    seed(s);
    unsigned shared = 0;
    unsigned seen = 0;
    launch(1, 32, [&] {
      if (lane() == 3) shared = 1;
      if (lane() == 4) seen = shared;
    });
    outcomes.insert(seen);
  }
  EXPECT_EQ(outcomes.size(), 2u);
}

// A warp that is several steps behind the others reads what they have written meanwhile.
TEST(StandIn, WarpsRunAheadOfEachOther) {
  std::set<unsigned> outcomes;
  for (uint64_t s = 0; s < 64; ++s) {
    seed(s);
    unsigned shared = 0;
    unsigned seen = 9;
    launch(1, 64, [&] {
      if (threadIdx.x < 32) {
        if (threadIdx.x == 7) seen = shared;
      } else {
        for (int step = 0; step < 3; ++step) __syncwarp();
        shared = 1;
      }
    });
    outcomes.insert(seen);
  }
  EXPECT_EQ(outcomes, (std::set<unsigned>{0, 1}));
}

TEST(StandIn, BlocksComeInAnyOrder) {
  std::set<std::vector<unsigned>> orders;
  for (uint64_t s = 0; s < 8; ++s) {
    seed(s);
    std::vector<unsigned> order;
    launch(6, 1, [&] { order.push_back(blockIdx.x); });
    orders.insert(order);
  }
  EXPECT_GT(orders.size(), 1u);
}

TEST(StandIn, ShufflesMoveValuesInsideAWarp) {
  std::vector<double> sums(96);
  std::vector<int> from_five(96);
  launch(1, 96, [&] {
    double x = threadIdx.x;
    for (int mask = 16; mask > 0; mask /= 2) x += __shfl_xor_sync(~0u, x, mask);
    sums[threadIdx.x] = x;
    from_five[threadIdx.x] = __shfl_sync(~0u, static_cast<int>(threadIdx.x), 5);
  });
  for (unsigned t = 0; t < 96; ++t) {
    const double first = t / 32 * 32;
    EXPECT_EQ(sums[t], 32 * first + 31 * 16);
    EXPECT_EQ(from_five[t], static_cast<int>(t / 32 * 32 + 5));
  }
}

TEST(StandIn, BallotsAndBlockWideOr) {
  std::vector<unsigned> ballots(64);
  std::vector<int> any(64);
  launch(1, 64, [&] {
    ballots[threadIdx.x] = __ballot_sync(~0u, threadIdx.x % 3 == 0);
    any[threadIdx.x] = __syncthreads_or(threadIdx.x == 40);
    any[threadIdx.x] += 2 * __syncthreads_or(0);
  });
  EXPECT_EQ(ballots[0], 0x49249249u);
  EXPECT_EQ(ballots[32], 0x92492492u);
  EXPECT_EQ(any, std::vector<int>(64, 1));
}

TEST(StandIn, AtomicsCountArrivals) {
  unsigned arrivals = 0;
  std::set<unsigned> tickets;
  launch(4, 33, [&] { tickets.insert(atomicAdd(&arrivals, 1u)); });
  EXPECT_EQ(arrivals, 4u * 33u);
  EXPECT_EQ(tickets.size(), 4u * 33u);
}

TEST(StandIn, SharedMemoryIsOnesOwnInEveryHostThread) {
  const auto play = [](unsigned value, unsigned* result) {
    for (int round = 0; round < 20; ++round) {
      launch(2, 32, [&] {
        __shared__ unsigned cell;
        if (threadIdx.x == 0) cell = value;
        __syncthreads();
        *result = cell;
      });
      if (*result != value) return;
    }
  };
  unsigned a = 0;
  unsigned b = 0;
  std::thread first(play, 1u, &a);
  std::thread second(play, 2u, &b);
  first.join();
  second.join();
  EXPECT_EQ(a, 1u);
  EXPECT_EQ(b, 2u);
}

using StandInDeathTest = ::testing::Test;

TEST(StandInDeathTest, WaitingForThreadsThatHaveReturned) {
  EXPECT_DEATH(launch(1, 64,
                      [] {
                        if (threadIdx.x != 9) __syncthreads();
                      }),
               "wait at __syncthreads for threads that have returned");
  EXPECT_DEATH(launch(1, 64,
                      [] {
                        if (threadIdx.x != 9) __syncwarp();
                      }),
               "lanes wait for lanes of their warp that have returned");
}

TEST(StandInDeathTest, WaitingInTwoPlaces) {
  EXPECT_DEATH(launch(1, 32,
                      [] {
                        if (threadIdx.x < 9) {
                          __syncthreads();
                        } else {
                          __syncwarp();
                        }
                      }),
               "at a warp's barrier and at the block's");
}

TEST(StandInDeathTest, MisalignedVectors) {
  alignas(16) static const char memory[32] = {};
  require_aligned(memory, 16);
  EXPECT_DEATH(launch(1, 1, [] { require_aligned(memory + 4, 16); }), "not aligned");
}

}  // namespace
}  // namespace fusewire::simt
