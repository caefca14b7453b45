// The engine from submission to result, with ranks as threads.
#include "engine/engine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <random>

#include "thread_ranks.h"

namespace fusewire {
namespace {

using testing::allreduce;
using testing::error_of;
using testing::in_place;
using testing::make_engines;
using testing::on_ranks;
using testing::with_engines;

class EngineRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, EngineRanks, ::testing::Values(1, 2, 3, 4, 8));

float rank_sum(int n) { return static_cast<float>(n * (n + 1)) / 2; }

TEST_P(EngineRanks, AllreduceSumsAndAverages) {
  const int n = GetParam();
  with_engines(n, [&](Engine& engine) {
    for (const size_t count : {0u, 1u, 7u, 4096u, 100'003u}) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage}) {
        std::vector<float> values(count, static_cast<float>(engine.rank() + 1));
        engine.wait(engine.submit(allreduce("x" + std::to_string(count), values, op), false));
        const float expected = op == ReduceOp::kSum ? rank_sum(n) : rank_sum(n) / static_cast<float>(n);
        EXPECT_EQ(values, std::vector<float>(count, expected));
      }
    }
  });
}

// Exact per name in any order on any rank.
TEST_P(EngineRanks, AnyOrder) {
  const int n = GetParam();
  constexpr int kTensors = 100;
  with_engines(n, [&](Engine& engine) {
    std::mt19937 random(static_cast<unsigned>(engine.rank()));
    std::vector<int> order(kTensors);
    std::iota(order.begin(), order.end(), 0);
    for (int round = 0; round < 50; ++round) {
      std::shuffle(order.begin(), order.end(), random);
      std::vector<std::vector<float>> values(kTensors);
      std::vector<Handle> handles;
      for (const int i : order) {
        auto& v = values[static_cast<size_t>(i)];
        v.assign(64, static_cast<float>(i * (engine.rank() + 1)));
        handles.push_back(engine.submit(allreduce("t" + std::to_string(i), v)));
      }
      engine.wait_all(handles);
      for (int i = 0; i < kTensors; ++i) {
        ASSERT_EQ(values[static_cast<size_t>(i)], std::vector<float>(64, static_cast<float>(i) * rank_sum(n)));
      }
    }
  });
}

TEST(Engine, GroupIsReducedAsOne) {
  with_engines(3, [](Engine& engine) {
    std::vector<float> a(5, 1), b(0), c(70'000, static_cast<float>(engine.rank()));
    Submission group;
    group.name = "group";
    for (auto* v : {&a, &b, &c}) group.tensors.push_back(in_place(*v));
    engine.wait(engine.submit(std::move(group)));
    EXPECT_EQ(a, std::vector<float>(5, 3));
    EXPECT_EQ(c, std::vector<float>(70'000, 3));
  });
}

TEST(Engine, BroadcastFromEveryRoot) {
  with_engines(4, [](Engine& engine) {
    for (int root = 0; root < 4; ++root) {
      std::vector<float> values(10'000, static_cast<float>(engine.rank()));
      Submission submission = allreduce("b" + std::to_string(root), values);
      submission.kind = OpKind::kBroadcast;
      submission.root = root;
      engine.wait(engine.submit(std::move(submission)));
      EXPECT_EQ(values, std::vector<float>(10'000, static_cast<float>(root)));
    }
  });
}

TEST(Engine, MismatchIsTheSameErrorEverywhereAndTheNameStaysUsable) {
  std::vector<std::string> texts(3);
  with_engines(3, [&](Engine& engine) {
    std::vector<float> values(engine.rank() == 1 ? 4 : 3, 1.0F);
    const Error error = error_of([&] { engine.wait(engine.submit(allreduce("x", values))); });
    EXPECT_EQ(error.code(), ErrorCode::kTensorMismatch);
    texts[static_cast<size_t>(engine.rank())] = error.what();
    values.assign(3, 1.0F);
    engine.wait(engine.submit(allreduce("x", values)));
    EXPECT_EQ(values, std::vector<float>(3, 3));
  });
  EXPECT_EQ(texts[0], texts[1]);
  EXPECT_EQ(texts[0], texts[2]);
  EXPECT_NE(texts[0].find("'x'"), std::string::npos);
}

TEST(Engine, SecondUseOfANameInFlightFailsAndTheFirstCompletes) {
  auto engines = make_engines(2);
  std::vector<float> first(3, 1), second(3, 1), peer(3, 1);
  const Handle one = engines[0]->submit(allreduce("x", first));
  const Handle two = engines[0]->submit(allreduce("x", second));
  EXPECT_EQ(error_of([&] { engines[0]->wait(two); }).code(), ErrorCode::kDuplicateName);
  on_ranks(2, [&](int rank) {
    if (rank == 0) engines[0]->wait(one);
    if (rank == 1) engines[1]->wait(engines[1]->submit(allreduce("x", peer)));
  });
  EXPECT_EQ(first, std::vector<float>(3, 2));
  EXPECT_EQ(second, std::vector<float>(3, 1));
}

TEST(Engine, AbsentRanksContributeNothingAndReceive) {
  with_engines(3, [](Engine& engine) {
    std::vector<float> values(1000, 2.0F);
    Submission submission = allreduce("x", values);
    if (engine.rank() == 1) {
      submission.tensors[0].absent = true;
      submission.tensors[0].input.data = nullptr;
    }
    const Handle handle = engine.submit(std::move(submission));
    engine.wait(handle);
    EXPECT_TRUE(handle->skipped().empty());
    EXPECT_EQ(values, std::vector<float>(1000, 4));
  });
}

TEST(Engine, AbsentEverywhereIsSkipped) {
  with_engines(2, [](Engine& engine) {
    std::vector<float> values(3, 7.0F);
    Submission submission = allreduce("x", values);
    submission.tensors[0].absent = true;
    const Handle handle = engine.submit(std::move(submission));
    engine.wait(handle);
    EXPECT_EQ(handle->skipped(), std::vector<bool>{true});
    EXPECT_EQ(values, std::vector<float>(3, 7));
  });
}

uint32_t add_set(Engine& engine, std::vector<int32_t> ranks, const std::string& name) {
  Submission submission;
  submission.kind = OpKind::kAddProcessSet;
  submission.name = name;
  submission.ranks = std::move(ranks);
  const Handle handle = engine.submit(std::move(submission));
  engine.wait(handle);
  return handle->created_set();
}

TEST(Engine, OverlappingProcessSetsWithOneRankLate) {
  with_engines(3, [](Engine& engine) {
    const uint32_t low = add_set(engine, {0, 1}, "low");
    const uint32_t high = add_set(engine, {1, 2}, "high");
    EXPECT_NE(low, high);
    EXPECT_EQ(engine.members(high), (std::vector<int32_t>{1, 2}));
    for (int round = 0; round < 100; ++round) {
      if (engine.rank() == round % 3) std::this_thread::sleep_for(std::chrono::microseconds(300));
      std::vector<float> a(3000, static_cast<float>(engine.rank() + 1)), b = a;
      std::vector<Handle> handles;
      for (const uint32_t set : {low, high}) {
        if (set == low ? engine.rank() == 2 : engine.rank() == 0) continue;
        Submission submission = allreduce("x", set == low ? a : b);
        submission.process_set = set;
        handles.push_back(engine.submit(std::move(submission)));
      }
      if (round % 2 == 1) std::reverse(handles.begin(), handles.end());
      engine.wait_all(handles);
      if (engine.rank() != 2) {
        ASSERT_EQ(a, std::vector<float>(3000, 3));
      }
      if (engine.rank() != 0) {
        ASSERT_EQ(b, std::vector<float>(3000, 5));
      }
    }
  });
}

// Names are sent once, so the first step's messages are many times larger than a mailbox. Whoever has sent half of one
// must not go into a data plane that the receiver of the other half has yet to hear of.
TEST(Engine, MessagesLargerThanAMailbox) {
  with_engines(3, [](Engine& engine) {
    const std::string prefix(100, 'n');
    std::vector<std::vector<float>> values(4000, std::vector<float>(3, 1.0F));
    std::vector<Handle> handles;
    for (size_t i = 0; i < values.size(); ++i) {
      handles.push_back(engine.submit(allreduce(prefix + std::to_string(i), values[i]), false));
    }
    engine.wait_all(handles);
    for (const auto& v : values) ASSERT_EQ(v, std::vector<float>(3, 3.0F));
  });
}

// Handles dropped without waiting; what they kept alive is dropped on a submitter's thread.
TEST(Engine, DroppedHandlesKeepTheirTensorsUntilDone) {
  static std::atomic<int> alive{0};
  struct Owner {
    std::vector<float> values = std::vector<float>(256, 1.0F);
    Owner() { ++alive; }
    ~Owner() { --alive; }
  };
  with_engines(2, [](Engine& engine) {
    for (int i = 0; i < 500; ++i) {
      auto owner = std::make_shared<Owner>();
      Submission submission = allreduce("x" + std::to_string(i), owner->values);
      submission.keep_alive = std::move(owner);
      engine.submit(std::move(submission));
    }
    std::vector<float> last(1);
    engine.wait(engine.submit(allreduce("last", last)));
  });
  EXPECT_EQ(alive, 0);
}

TEST(Engine, ThousandsOfAllreducesOnEightRanksWhileTheCacheEvicts) {
  Config config;
  config.cache_capacity = 5;
  with_engines(
      8,
      [](Engine& engine) {
        std::mt19937 random(static_cast<unsigned>(engine.rank()));
        std::vector<int> order(20);
        std::iota(order.begin(), order.end(), 0);
        for (int round = 0; round < 60; ++round) {
          std::shuffle(order.begin(), order.end(), random);
          std::vector<std::vector<float>> values(order.size());
          std::vector<Handle> handles;
          for (const int i : order) {
            values[static_cast<size_t>(i)].assign(static_cast<size_t>(i * 37), 1.0F);
            handles.push_back(engine.submit(allreduce("t" + std::to_string(i), values[static_cast<size_t>(i)])));
          }
          engine.wait_all(handles);
          for (size_t i = 0; i < values.size(); ++i) ASSERT_EQ(values[i], std::vector<float>(i * 37, 8.0F));
        }
      },
      config);
}

TEST(Engine, PendingOperationsFailAtShutdownAndLaterOnesToo) {
  auto engines = make_engines(2);
  std::vector<float> values(3, 1);
  const Handle handle = engines[1]->submit(allreduce("x", values));
  engines[1]->shutdown(true, "done");
  EXPECT_EQ(error_of([&] { engines[1]->wait(handle); }).code(), ErrorCode::kShutdown);
  EXPECT_EQ(error_of([&] { engines[1]->submit(allreduce("y", values)); }).code(), ErrorCode::kShutdown);
}

// The others may still be copying the last results home.
TEST(Engine, LeavingRightAfterTheLastResultDisturbsNobody) {
  for (int round = 0; round < 40; ++round) {
    auto engines = make_engines(3);
    on_ranks(3, [&](int rank) {
      auto& engine = *engines[static_cast<size_t>(rank)];
      std::vector<float> values(300'000, 1.0F);
      engine.wait(engine.submit(allreduce("last", values)));
      engine.shutdown(true, "done");
      ASSERT_EQ(values, std::vector<float>(300'000, 3.0F));
    });
  }
}

TEST(Engine, AWaiterIsFreedByShutdownFromAnotherThread) {
  auto engines = make_engines(2);
  std::vector<float> values(3, 1);
  std::thread waiter([&] {
    EXPECT_EQ(error_of([&] { engines[0]->wait(engines[0]->submit(allreduce("x", values))); }).code(),
              ErrorCode::kShutdown);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  engines[0]->shutdown(true, "done");
  waiter.join();
}

TEST(Engine, ARankThatLeavesWhileOthersWaitIsNamedEverywhere) {
  auto engines = make_engines(3);
  on_ranks(3, [&](int rank) {
    auto& engine = *engines[static_cast<size_t>(rank)];
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      engine.shutdown(false, "ZeroDivisionError: division by zero");
      return;
    }
    std::vector<float> values(3, 1);
    const Error error = error_of([&] { engine.wait(engine.submit(allreduce("x", values))); });
    EXPECT_EQ(error.code(), ErrorCode::kPeerLost);
    EXPECT_EQ(error.rank(), 1);
    EXPECT_NE(std::string(error.what()).find("ZeroDivisionError"), std::string::npos) << error.what();
    EXPECT_EQ(error_of([&] { engine.submit(allreduce("y", values)); }).code(), ErrorCode::kPeerLost);
  });
}

TEST(Engine, ARankThatLeavesWhileOthersAreIdleDisturbsNobodyUntilItIsNeeded) {
  auto engines = make_engines(3);
  engines[2]->shutdown(true, "finished early");
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(engines[0]->failure(), nullptr);
  on_ranks(2, [&](int rank) {
    std::vector<float> values(3, 1);
    auto& engine = *engines[static_cast<size_t>(rank)];
    const Error error = error_of([&] { engine.wait(engine.submit(allreduce("x", values))); });
    EXPECT_EQ(error.code(), ErrorCode::kPeerLost);
    EXPECT_EQ(error.rank(), 2);
  });
}

TEST(Engine, TheRootLeaves) {
  auto engines = make_engines(2);
  std::thread waiter([&] {
    std::vector<float> values(3, 1);
    const Error error = error_of([&] { engines[1]->wait(engines[1]->submit(allreduce("x", values))); });
    EXPECT_EQ(error.code(), ErrorCode::kPeerLost);
    EXPECT_EQ(error.rank(), 0);
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  engines[0]->shutdown(true, "done");
  waiter.join();
}

TEST(Engine, TheErrorOfAStallTellsWhatTheLateRankDoes) {
  Config config;
  config.stall_check_seconds = 0;
  config.stall_abort_seconds = 0.4;
  auto engines = make_engines(2, config);
  engines[1]->set_activity_source([] { return std::string("it reads\nthe data"); });
  std::vector<float> values(10, 1.0f);
  const Error error = error_of([&] { engines[0]->wait(engines[0]->submit(allreduce("x", values))); });
  EXPECT_EQ(error.code(), ErrorCode::kStalled);
  EXPECT_NE(std::string(error.what()).find("what rank 1 does:\n    it reads\n    the data"), std::string::npos)
      << error.what();
}

TEST(Engine, StallAbortsEverywhereWithTheSameError) {
  Config config;
  config.stall_check_seconds = 0;
  config.stall_abort_seconds = 0.2;
  auto engines = make_engines(3, config);
  on_ranks(2, [&](int rank) {
    std::vector<float> values(3, 1);
    auto& engine = *engines[static_cast<size_t>(rank)];
    const Error error = error_of([&] { engine.wait(engine.submit(allreduce("late", values))); });
    EXPECT_EQ(error.code(), ErrorCode::kStalled) << error.what();
    EXPECT_NE(std::string(error.what()).find("late"), std::string::npos) << error.what();
  });
  std::vector<float> values(3, 1);
  const Error error = error_of([&] { engines[2]->wait(engines[2]->submit(allreduce("late", values))); });
  EXPECT_EQ(error.code(), ErrorCode::kStalled) << error.what();
}

TEST(Engine, SeveralThreadsOfOneRankWait) {
  with_engines(2, [](Engine& engine) {
    on_ranks(4, [&](int thread) {
      for (int i = 0; i < 200; ++i) {
        std::vector<float> values(16, 1.0F);
        engine.wait(engine.submit(allreduce("thread" + std::to_string(thread), values), i % 2 == 0));
        ASSERT_EQ(values, std::vector<float>(16, 2.0F));
      }
    });
  });
}

}  // namespace
}  // namespace fusewire
