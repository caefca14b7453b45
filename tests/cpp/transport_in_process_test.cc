// The in-process fabric: what eight ranks as threads tell each other arrives whole, once and in order; who leaves is
// noticed.
#include <gtest/gtest.h>

#include <atomic>
#include <mutex>
#include <thread>

#include "common/error.h"
#include "transport/endpoint.h"
#include "transport_traffic.h"

namespace fusewire {
namespace {

using testing::make_frame;
using testing::random_size;
using testing::SeatedDriver;
using testing::text_frame;

struct Departures {
  std::mutex mutex;
  std::vector<Departure> all;
  Endpoint::DepartureCallback callback() {
    return [this](const Departure& departure) {
      const std::lock_guard lock(mutex);
      all.push_back(departure);
    };
  }
  size_t count() {
    const std::lock_guard lock(mutex);
    return all.size();
  }
};

class Fabric : public ::testing::TestWithParam<int> {};

// Every leaf sends frames at its own pace while the root answers each with one of its own: both directions stream, both
// sides sleep, rings run full.
TEST_P(Fabric, RandomFramesBothWays) {
  constexpr int kFrames = 600;
  const int size = GetParam();
  auto endpoints = make_in_process_fabric(size);
  std::vector<std::thread> threads;
  for (int rank = 1; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      Endpoint& endpoint = *endpoints[rank];
      std::mt19937_64 random(rank);
      SeatedDriver driver(endpoint, rank % 2 == 0 ? 0 : 200);
      int received = 0;
      std::vector<std::byte> frame;
      const auto drain = [&] {
        while (endpoint.receive(0, frame)) {
          ASSERT_EQ(frame, make_frame(frame.size(), rank * 1000003ULL + received));
          ++received;
        }
      };
      for (int i = 0; i < kFrames; ++i) {
        endpoint.send(0, make_frame(random_size(random), rank * 7919ULL + i));
        if (random() % 4 == 0) drain();
        if (random() % 64 == 0) std::this_thread::yield();
      }
      while (received < kFrames) {
        endpoint.flush();
        drain();
        if (received < kFrames) driver.idle();
      }
    });
  }
  {
    Endpoint& root = *endpoints[0];
    std::mt19937_64 random(99);
    SeatedDriver driver(root);
    std::vector<int> received(size, 0);
    int left = (size - 1) * kFrames;
    std::vector<std::byte> frame;
    while (left > 0) {
      root.flush();
      for (int peer = 1; peer < size; ++peer) {
        while (root.receive(peer, frame)) {
          ASSERT_EQ(frame, make_frame(frame.size(), peer * 7919ULL + received[peer]));
          root.send(peer, make_frame(random_size(random), peer * 1000003ULL + received[peer]));
          ++received[peer];
          --left;
        }
      }
      if (left > 0) driver.idle();
    }
    // What is still in the outbox leaves when the leaves make room.
    std::atomic<bool> joined{false};
    std::thread joiner([&] {
      for (auto& thread : threads) thread.join();
      joined = true;
      root.seat().ring();
    });
    while (!joined) {
      root.flush();
      if (!joined) {
        const uint32_t ticket = root.seat().announce_sleep();
        if (joined || root.has_incoming()) {
          root.seat().cancel_sleep();
        } else {
          root.seat().sleep(ticket, std::nullopt);
        }
      }
    }
    joiner.join();
  }
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
    EXPECT_EQ(driver.receive(1), largest);
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
  auto endpoints = make_in_process_fabric(3);
  Departures seen[3];
  for (int rank = 0; rank < 3; ++rank) endpoints[rank]->watch(seen[rank].callback());
  endpoints[2]->send(0, text_frame("last words"));
  endpoints[2]->goodbye(true, "finished");
  endpoints[2]->goodbye(false, "again");
  endpoints[2].reset();
  ASSERT_EQ(seen[0].count(), 1u);
  EXPECT_EQ(seen[0].all[0].rank, 2);
  EXPECT_TRUE(seen[0].all[0].clean);
  EXPECT_EQ(seen[0].all[0].reason, "finished");
  EXPECT_EQ(seen[1].count(), 0u);
  std::vector<std::byte> frame;
  ASSERT_TRUE(endpoints[0]->receive(2, frame));
  EXPECT_EQ(frame, text_frame("last words"));
  endpoints[0]->send(2, text_frame("to nobody"));

  endpoints[0]->goodbye(false, "the root has had enough");
  ASSERT_EQ(seen[1].count(), 1u);
  EXPECT_EQ(seen[1].all[0].rank, 0);
  EXPECT_FALSE(seen[1].all[0].clean);
  EXPECT_EQ(seen[1].all[0].reason, "the root has had enough");
  endpoints[1]->goodbye(true, "");
  EXPECT_EQ(seen[0].count(), 1u) << "nothing is delivered after one's own goodbye";
}

TEST(InProcess, DestructionLooksLikeACrashAlsoToALateWatcher) {
  auto endpoints = make_in_process_fabric(2);
  endpoints[1].reset();
  Departures seen;
  endpoints[0]->watch(seen.callback());
  ASSERT_EQ(seen.count(), 1u);
  EXPECT_FALSE(seen.all[0].clean);
  EXPECT_EQ(seen.all[0].rank, 1);
  EXPECT_THROW(endpoints[0]->watch(seen.callback()), Error);
}

TEST(InProcess, ASleepingDriverWakesWhenItsPeerLeaves) {
  auto endpoints = make_in_process_fabric(2);
  std::atomic<bool> gone{false};
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
