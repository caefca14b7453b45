// The in-process fabric: what eight ranks as threads tell each other arrives whole, once and in order; who leaves is
// noticed.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "common/error.h"
#include "transport/endpoint.h"
#include "transport_traffic.h"

namespace fusewire {
namespace {

using testing::Departures;
using testing::exchange_as_leaf;
using testing::exchange_as_root;
using testing::make_frame;
using testing::same;
using testing::SeatedDriver;
using testing::text_frame;

class Fabric : public ::testing::TestWithParam<int> {};

TEST_P(Fabric, RandomFramesBothWays) {
  constexpr int kFrames = 600;
  const int size = GetParam();
  auto endpoints = make_in_process_fabric(size);
  std::vector<std::thread> threads;
  for (int rank = 1; rank < size; ++rank) {
    threads.emplace_back([&, rank] { EXPECT_EQ(exchange_as_leaf(*endpoints[rank], kFrames), ""); });
  }
  EXPECT_EQ(exchange_as_root(*endpoints[0], kFrames), "");
  for (auto& thread : threads) thread.join();
  for (auto& endpoint : endpoints) endpoint->goodbye(true, "done");
}

INSTANTIATE_TEST_SUITE_P(Sizes, Fabric, ::testing::Values(2, 3, 8));

TEST(InProcess, EmptyAndLargestFrames) {
  auto endpoints = make_in_process_fabric(2);
  endpoints[1]->send(0, {});
  std::vector<std::byte> frame = text_frame("stale");
  ASSERT_TRUE(endpoints[0]->receive(1, frame));
  EXPECT_TRUE(frame.empty());
  EXPECT_FALSE(endpoints[0]->receive(1, frame));
  EXPECT_FALSE(endpoints[0]->has_incoming());

  const auto largest = make_frame(kMaxFrameBytes, 5);
  std::thread sender([&] {
    SeatedDriver driver(*endpoints[1]);
    endpoints[1]->send(0, largest);
    endpoints[1]->send(0, text_frame("behind it"));
    EXPECT_EQ(driver.receive(0), text_frame("got both"));
  });
  {
    SeatedDriver driver(*endpoints[0]);
    EXPECT_TRUE(same(driver.receive(1), largest));
    EXPECT_EQ(driver.receive(1), text_frame("behind it"));
    endpoints[0]->send(1, text_frame("got both"));
  }
  sender.join();
  const std::vector<std::byte> too_large(kMaxFrameBytes + 1);
  EXPECT_THROW(endpoints[1]->send(0, too_large), Error);
  endpoints[1]->send(0, text_frame("still fine"));
  ASSERT_TRUE(endpoints[0]->receive(1, frame));
  EXPECT_EQ(frame, text_frame("still fine"));
}

TEST(InProcess, LeavesOnlyTalkToTheRoot) {
  auto endpoints = make_in_process_fabric(3);
  EXPECT_THROW(endpoints[1]->send(2, text_frame("x")), Error);
  EXPECT_THROW(endpoints[0]->send(0, text_frame("x")), Error);
  EXPECT_THROW(endpoints[0]->send(3, text_frame("x")), Error);
  std::vector<std::byte> frame;
  EXPECT_THROW(endpoints[2]->receive(-1, frame), Error);
  EXPECT_THROW(make_in_process_fabric(0), Error);
}

TEST(InProcess, GoodbyeReachesTheRootOnceAndOnlyTheRoot) {
  Departures seen[3];
  auto endpoints = make_in_process_fabric(3);
  for (int rank = 0; rank < 3; ++rank) endpoints[rank]->watch(seen[rank].callback());
  endpoints[2]->send(0, text_frame("last words"));
  endpoints[2]->goodbye(true, "finished");
  endpoints[2]->goodbye(false, "again");
  endpoints[2].reset();
  ASSERT_EQ(seen[0].count(), 1u);
  EXPECT_EQ(seen[0].at(0).rank, 2);
  EXPECT_TRUE(seen[0].at(0).clean);
  EXPECT_EQ(seen[0].at(0).reason, "finished");
  EXPECT_EQ(seen[1].count(), 0u);
  std::vector<std::byte> frame;
  ASSERT_TRUE(endpoints[0]->receive(2, frame));
  EXPECT_EQ(frame, text_frame("last words"));
  endpoints[0]->send(2, text_frame("to nobody"));

  endpoints[0]->goodbye(false, "the root has had enough");
  ASSERT_EQ(seen[1].count(), 1u);
  EXPECT_EQ(seen[1].at(0).rank, 0);
  EXPECT_FALSE(seen[1].at(0).clean);
  EXPECT_EQ(seen[1].at(0).reason, "the root has had enough");
  endpoints[1]->goodbye(true, "");
  EXPECT_EQ(seen[0].count(), 1u) << "nothing is delivered after one's own goodbye";
}

TEST(InProcess, DestructionLooksLikeACrashAlsoToALateWatcher) {
  Departures seen;
  auto endpoints = make_in_process_fabric(2);
  endpoints[1].reset();
  endpoints[0]->watch(seen.callback());
  ASSERT_EQ(seen.count(), 1u);
  EXPECT_FALSE(seen.at(0).clean);
  EXPECT_EQ(seen.at(0).rank, 1);
  EXPECT_THROW(endpoints[0]->watch(seen.callback()), Error);
}

TEST(InProcess, ASleepingDriverWakesWhenItsPeerLeaves) {
  std::atomic<bool> gone{false};
  auto endpoints = make_in_process_fabric(2);
  endpoints[0]->watch([&](const Departure&) { gone = true; });
  std::thread sleeper([&] {
    SeatedDriver driver(*endpoints[0], 0);
    while (!gone) driver.idle();
  });
  endpoints[1]->goodbye(false, "crash");
  sleeper.join();
}

// Everybody leaves at once, many times: no callback runs after its owner's goodbye, nobody deadlocks.
TEST(InProcess, AllLeaveAtOnce) {
  for (int round = 0; round < 200; ++round) {
    auto endpoints = make_in_process_fabric(4);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < 4; ++rank) {
      threads.emplace_back([&endpoints, rank] {
        auto alive = std::make_unique<std::atomic<bool>>(true);
        endpoints[rank]->watch([&flag = *alive](const Departure&) { EXPECT_TRUE(flag.load()); });
        endpoints[rank]->goodbye(true, "bye");
        alive->store(false);
        alive.reset();
        endpoints[rank].reset();
      });
    }
    for (auto& thread : threads) thread.join();
  }
}

TEST(InProcess, SharedMemoryIsTheSameForAllAndOutlivesTheEndpoints) {
  auto endpoints = make_in_process_fabric(3);
  const SharedMapping a = endpoints[0]->map_shared(4096, 100000);
  const SharedMapping b = endpoints[2]->map_shared(4096, 100000);
  const SharedMapping other = endpoints[1]->map_shared(1 << 20, 8192);
  EXPECT_EQ(a.data, b.data);
  EXPECT_EQ(a.size, 100000u);
  EXPECT_NE(a.data, other.data);
  for (size_t i = 0; i < a.size; ++i) ASSERT_EQ(a.data[i], std::byte{0});
  a.data[99999] = std::byte{7};
  EXPECT_THROW(endpoints[0]->map_shared(4096, 5), Error);
  endpoints.clear();
  EXPECT_EQ(b.data[99999], std::byte{7});
}

TEST(InProcess, OneRankAlone) {
  auto endpoints = make_in_process_fabric(1);
  endpoints[0]->watch([](const Departure&) { FAIL(); });
  endpoints[0]->flush();
  EXPECT_FALSE(endpoints[0]->has_incoming());
  EXPECT_EQ(endpoints[0]->map_shared(0, 64).size, 64u);
  endpoints[0]->goodbye(true, "");
}

}  // namespace
}  // namespace fusewire
