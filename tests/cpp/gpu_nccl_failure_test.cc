// What goes wrong with an NCCL, and that all members hear of it; and the way a plane ends.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <thread>

#include "common/error.h"
#include "nccl_world.h"

namespace fusewire::testing {
namespace {

using std::chrono::milliseconds;

// A sum of two tensors, in memory that outlives what is left on a GPU.
struct Sum {
  explicit Sum(int64_t count = 100) : values(static_cast<size_t>(2 * count), 1.0F) {
    bucket.elements = 2 * count;
    for (int64_t i = 0; i < 2; ++i) {
      const TensorView view = contiguous_view(values.data() + i * count, DataType::kFloat32, {count});
      bucket.segments.push_back({view, view});
    }
  }
  std::vector<float> values;
  Bucket bucket;
};

// What every rank's body threw, as "code: text".
struct Outcome {
  ErrorCode code = ErrorCode::kInternal;
  std::string text = "nothing was thrown";
};

struct World {
  explicit World(int size) : outcomes(static_cast<size_t>(size)) {
    for (int rank = 0; rank < size; ++rank) ranks.push_back(std::make_unique<NcclRank>(fabric, rank, 7));
  }
  ~World() {
    for (const auto& rank : ranks) EXPECT_EQ(rank->gpu.mistakes(), "");
    EXPECT_EQ(join_sentences(fabric.mistakes()), "");
  }

  GpuPlaneOptions options(int rank, milliseconds abort_after = {}) const {
    return {.rank = rank, .size = static_cast<int>(ranks.size()), .abort_after = abort_after};
  }

  // Errors of bodies go to `outcomes`; the CPU planes live until all have ended.
  void run(const std::function<void(int, NcclRank&, Backend&)>& body) {
    const std::string faults =
        run_threads(static_cast<int>(ranks.size()), meeting_place(), [&](int rank, Backend& cpu) -> std::string {
          const auto r = static_cast<size_t>(rank);
          try {
            body(rank, *ranks[r], cpu);
          } catch (const Error& error) {
            outcomes[r] = {error.code(), error.what()};
          }
          ranks[r]->plane.reset();
          return ranks[r]->nccl.open_communicators() == 0 ? "" : "a communicator is left";
        });
    EXPECT_EQ(faults, "");
  }

  NcclFabric fabric;
  std::vector<std::unique_ptr<NcclRank>> ranks;
  std::vector<Outcome> outcomes;
};

// ---- making a communicator ----

TEST(GpuNcclFailure, WithoutAnIdAllMembersSayTheSame) {
  World world(3);
  world.ranks[0]->nccl.fails = "get_unique_id";
  world.run([&](int rank, NcclRank& self, Backend& cpu) { self.start(cpu, world.options(rank)); });
  for (const Outcome& outcome : world.outcomes) {
    EXPECT_EQ(outcome.code, ErrorCode::kCollective);
    EXPECT_EQ(outcome.text, "NCCL: no id for a communicator: double error 2");
  }
}

TEST(GpuNcclFailure, AMemberThatCannotJoinStopsTheOthers) {
  World world(3);
  world.ranks[1]->nccl.fails = "init_rank_config";
  world.run([&](int rank, NcclRank& self, Backend& cpu) { self.start(cpu, world.options(rank)); });
  EXPECT_EQ(world.outcomes[1].code, ErrorCode::kCollective);
  EXPECT_NE(world.outcomes[1].text.find("double error 2"), std::string::npos) << world.outcomes[1].text;
  EXPECT_NE(world.outcomes[1].text.find("FUSEWIRE_GPU_BACKEND=staged"), std::string::npos);
  EXPECT_EQ(world.outcomes[0].code, ErrorCode::kPeerLost);
  EXPECT_EQ(world.outcomes[2].code, ErrorCode::kPeerLost);
}

TEST(GpuNcclFailure, AMemberThatNeverJoinsIsAStall) {
  World world(2);
  world.ranks[1]->nccl.silent = "init_rank_config";
  world.run([&](int rank, NcclRank& self, Backend& cpu) { self.start(cpu, world.options(rank, milliseconds(30))); });
  for (const Outcome& outcome : world.outcomes) {
    // Whoever's time is up first stops the other.
    EXPECT_TRUE(outcome.code == ErrorCode::kStalled || outcome.code == ErrorCode::kPeerLost) << outcome.text;
  }
  EXPECT_TRUE(world.outcomes[0].code == ErrorCode::kStalled || world.outcomes[1].code == ErrorCode::kStalled);
}

TEST(GpuNcclFailure, AnErrorWhileItIsMadeIsToldInNcclsWords) {
  World world(2);
  for (auto& rank : world.ranks) rank->nccl.async_error = NcclResult::kRemoteError;
  world.run([&](int rank, NcclRank& self, Backend& cpu) { self.start(cpu, world.options(rank)); });
  for (const Outcome& outcome : world.outcomes) {
    EXPECT_TRUE(outcome.code == ErrorCode::kCollective || outcome.code == ErrorCode::kPeerLost);
  }
}

// ---- running buckets ----

class FailingCall : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(, FailingCall,
                         ::testing::Values("all_reduce", "group_start", "group_end", "send", "recv", "broadcast"));

// The member that a call fails for says so, and the others are stopped: now, or when they ask.
TEST_P(FailingCall, IsAnErrorOnAllMembers) {
  World world(2);
  world.ranks[1]->nccl.fails = GetParam();
  std::vector<Sum> sums(2);
  std::vector<Sum> received(2, Sum(200));
  world.run([&](int rank, NcclRank& self, Backend& cpu) {
    self.start(cpu, world.options(rank));
    Bucket bucket = sums[static_cast<size_t>(rank)].bucket;
    if (std::string(GetParam()) == "broadcast") {
      bucket.kind = OpKind::kBroadcast;
    } else if (std::string(GetParam()) != "all_reduce") {
      bucket.kind = OpKind::kAlltoall;
      for (size_t s = 0; s < 2; ++s) {
        bucket.segments[s].counts = {50, 50, 50, 50};
        float* const to = received[static_cast<size_t>(rank)].values.data() + s * 200;
        bucket.segments[s].output = contiguous_view(to, DataType::kFloat32, {100});
      }
    }
    self.plane->run(bucket);
    ASSERT_EQ(rank, 0);
    for (;;) {
      self.plane->check();
      std::this_thread::sleep_for(milliseconds(1));
    }
  });
  EXPECT_EQ(world.outcomes[1].code, ErrorCode::kCollective) << world.outcomes[1].text;
  EXPECT_NE(world.outcomes[1].text.find("on rank 1"), std::string::npos) << world.outcomes[1].text;
  EXPECT_EQ(world.outcomes[0].code, ErrorCode::kPeerLost) << world.outcomes[0].text;
  EXPECT_EQ(world.ranks[0]->nccl.called("destroy"), 0u);
  EXPECT_EQ(world.ranks[0]->nccl.called("abort"), 1u);
}

TEST(GpuNcclFailure, WhatFailsOnTheDeviceIsFoundByCheckAndStays) {
  World world(2);
  std::vector<Sum> sums(2);
  std::vector<std::string> again(2);
  world.run([&](int rank, NcclRank& self, Backend& cpu) {
    self.start(cpu, world.options(rank));
    self.to_the_end->run(sums[static_cast<size_t>(rank)].bucket);
    self.plane->check();
    self.nccl.async_error = NcclResult::kRemoteError;
    try {
      self.plane->check();
    } catch (const Error& error) {
      again[static_cast<size_t>(rank)] = error.what();
    }
    self.plane->run(sums[static_cast<size_t>(rank)].bucket);
  });
  for (size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(world.outcomes[r].code, ErrorCode::kCollective);
    EXPECT_EQ(world.outcomes[r].text, again[r]);
    EXPECT_NE(again[r].find("double error 6"), std::string::npos) << again[r];
    EXPECT_EQ(sums[r].values[0], 2.0F);
  }
}

// A member that does not launch: the others' work stays on the device until it is aborted, and then ends.
TEST(GpuNcclFailure, WorkThatAMemberNeverJoinsEndsByAbort) {
  World world(2);
  std::vector<Sum> sums(2);
  std::atomic<bool> ended{false};
  world.run([&](int rank, NcclRank& self, Backend& cpu) {
    self.start(cpu, world.options(rank));
    self.to_the_end->run(sums[static_cast<size_t>(rank)].bucket);  // the buffer has grown
    if (rank == 1) {
      ended.wait(false);
      return;
    }
    self.plane->run(sums[0].bucket);
    const SharedEvent mark = self.gpu.device->mark();
    for (int i = 0; i < 20; ++i) EXPECT_FALSE(mark->reached());
    auto waiter = std::async(std::launch::async, [&] { mark->synchronize(); });
    self.plane->abort();
    self.plane->abort();
    waiter.get();
    ended = true;
    ended.notify_all();
    self.plane->run(sums[0].bucket);
  });
  EXPECT_EQ(world.outcomes[0].code, ErrorCode::kPeerLost) << world.outcomes[0].text;
  EXPECT_EQ(world.ranks[0]->nccl.called("abort"), 1u);
}

// A call that NCCL is still busy with is left when somebody aborts, and when time is up.
TEST(GpuNcclFailure, ACallThatTakesForEverIsLeft) {
  for (const bool by_abort : {true, false}) {
    World world(2);
    std::vector<Sum> sums(2);
    world.run([&](int rank, NcclRank& self, Backend& cpu) {
      self.start(cpu, world.options(rank, by_abort ? milliseconds(0) : milliseconds(40)));
      self.to_the_end->run(sums[static_cast<size_t>(rank)].bucket);
      self.nccl.slow_polls = 1 << 30;
      std::future<void> aborter;
      if (by_abort && rank == 0) {
        aborter = std::async(std::launch::async, [&] {
          std::this_thread::sleep_for(milliseconds(10));
          self.plane->abort();
        });
      }
      self.plane->run(sums[static_cast<size_t>(rank)].bucket);
    });
    bool stalled = false;
    for (const Outcome& outcome : world.outcomes) {
      EXPECT_TRUE(outcome.code == ErrorCode::kStalled || outcome.code == ErrorCode::kPeerLost) << outcome.text;
      stalled = stalled || outcome.code == ErrorCode::kStalled;
    }
    EXPECT_EQ(stalled, !by_abort);
  }
}

// ---- memory and the end ----

TEST(GpuNcclEnd, AfterGoodWorkEverythingIsTakenApartInOrder) {
  World world(2);
  for (auto& rank : world.ranks) rank->nccl.slow_polls = 3;
  world.run([&](int rank, NcclRank& self, Backend& cpu) {
    self.start(cpu, world.options(rank), {});
    Sum first(10);
    self.to_the_end->run(first.bucket);
    Sum larger(400'000);
    self.to_the_end->run(larger.bucket);
    EXPECT_EQ(larger.values.back(), 2.0F);
    self.to_the_end->run(first.bucket);
    EXPECT_EQ(first.values[3], 4.0F);
    self.plane.reset();
  });
  for (const auto& rank : world.ranks) {
    NcclDouble& nccl = rank->nccl;
    EXPECT_EQ(nccl.called("mem_alloc"), 2u);  // it has grown once
    EXPECT_EQ(nccl.called("mem_free"), 2u);
    EXPECT_EQ(nccl.called("window_register"), 2u);
    EXPECT_EQ(nccl.called("window_deregister"), 2u);
    EXPECT_EQ(nccl.called("finalize"), 1u);
    EXPECT_EQ(nccl.called("destroy"), 1u);
    EXPECT_EQ(nccl.called("abort"), 0u);
  }
}

// The buffer that is too small is still in use by the buckets before.
TEST(GpuNcclEnd, ABufferGrowsOnlyWhenNobodyUsesTheOldOne) {
  World world(2);
  std::vector<Sum> small(2);
  std::vector<std::unique_ptr<Sum>> large;
  for (int i = 0; i < 2; ++i) large.push_back(std::make_unique<Sum>(400'000));
  world.run([&](int rank, NcclRank& self, Backend& cpu) {
    const auto r = static_cast<size_t>(rank);
    self.start(cpu, world.options(rank), {});
    self.plane->run(small[r].bucket);
    self.plane->run(large[r]->bucket);
    self.plane->run(small[r].bucket);
    self.gpu.device->mark()->synchronize();
    self.plane.reset();
  });
  for (size_t r = 0; r < 2; ++r) {
    EXPECT_EQ(small[r].values[5], 4.0F);
    EXPECT_EQ(large[r]->values.back(), 2.0F);
    EXPECT_EQ(world.outcomes[r].text, "nothing was thrown");
  }
}

// check() is another thread's, all the while.
TEST(GpuNcclEnd, WhoeverWatchesMayAskAtAnyTime) {
  World world(2);
  for (auto& rank : world.ranks) rank->nccl.slow_polls = 2;
  world.run([&](int rank, NcclRank& self, Backend& cpu) {
    self.start(cpu, world.options(rank));
    std::atomic<bool> done{false};
    auto watcher = std::async(std::launch::async, [&] {
      while (!done) self.plane->check();
    });
    Sum sum;
    for (int i = 0; i < 5; ++i) self.to_the_end->run(sum.bucket);
    done = true;
    watcher.get();
    EXPECT_EQ(sum.values[0], 32.0F);
  });
  for (const Outcome& outcome : world.outcomes) EXPECT_EQ(outcome.text, "nothing was thrown");
}

TEST(GpuNcclEnd, ACommunicatorThatCannotBeFinalizedIsAborted) {
  World world(2);
  for (auto& rank : world.ranks) rank->nccl.fails = "finalize";
  world.run([&](int rank, NcclRank& self, Backend& cpu) {
    self.start(cpu, world.options(rank));
    Sum sum;
    self.to_the_end->run(sum.bucket);
    self.plane.reset();
  });
  for (const auto& rank : world.ranks) EXPECT_EQ(rank->nccl.called("abort"), 1u);
}

// One member without the memory, and none has a window.
TEST(GpuNcclEnd, AMemberWithoutMemoryMeansOrdinaryMemoryForAll) {
  World world(3);
  world.ranks[2]->nccl.fails = "mem_alloc";
  world.run([&](int rank, NcclRank& self, Backend& cpu) {
    self.start(cpu, world.options(rank));
    for (int i = 0; i < 2; ++i) {
      Sum sum;
      self.to_the_end->run(sum.bucket);
      EXPECT_EQ(sum.values[7], 3.0F);
    }
  });
  for (const auto& rank : world.ranks) {
    EXPECT_EQ(rank->nccl.called("mem_alloc"), 1u);
    EXPECT_EQ(rank->nccl.called("window_register"), 0u);
    EXPECT_EQ(rank->nccl.called("destroy"), 1u);
  }
  for (const Outcome& outcome : world.outcomes) EXPECT_EQ(outcome.text, "nothing was thrown");
}

TEST(GpuNcclEnd, AMemberThatCannotRegisterItsMemoryStopsTheOthers) {
  World world(3);
  world.ranks[2]->nccl.fails = "window_register";
  std::vector<Sum> sums(3);
  world.run([&](int rank, NcclRank& self, Backend& cpu) {
    self.start(cpu, world.options(rank));
    self.plane->run(sums[static_cast<size_t>(rank)].bucket);
  });
  EXPECT_EQ(world.outcomes[2].code, ErrorCode::kCollective) << world.outcomes[2].text;
  EXPECT_NE(world.outcomes[2].text.find("registering a window"), std::string::npos) << world.outcomes[2].text;
  for (size_t r = 0; r < 2; ++r) EXPECT_EQ(world.outcomes[r].code, ErrorCode::kPeerLost) << world.outcomes[r].text;
  for (const auto& rank : world.ranks) EXPECT_EQ(rank->nccl.called("mem_free"), 1u);
}

TEST(GpuNcclEnd, OneMemberNeedsNoNccl) {
  World world(1);
  world.run([&](int rank, NcclRank& self, Backend& cpu) {
    self.start(cpu, world.options(rank));
    Sum sum;
    self.to_the_end->run(sum.bucket);
    EXPECT_EQ(sum.values[0], 1.0F);
    self.plane->check();
    EXPECT_EQ(self.plane->laggards(), std::vector<int>());
  });
  EXPECT_TRUE(world.ranks[0]->nccl.calls().empty());
}

}  // namespace
}  // namespace fusewire::testing
