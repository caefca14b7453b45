// Uneven inputs: ranks that have joined keep the data plane going for the others; and sets that members adopt.
#include <gtest/gtest.h>

#include <random>

#include "thread_ranks.h"

namespace fusewire {
namespace {

using testing::allreduce;
using testing::error_of;
using testing::make_engines;
using testing::on_ranks;
using testing::with_engines;

Handle join(Engine& engine) {
  Submission submission;
  submission.kind = OpKind::kJoin;
  return engine.submit(std::move(submission));
}

int64_t join_and_wait(Engine& engine) {
  const Handle handle = join(engine);
  engine.wait(handle);
  return handle->extents().at(0);
}

Submission in_set(uint32_t set, Submission submission) {
  submission.process_set = set;
  return submission;
}

uint32_t adopt(Engine& engine, std::vector<int32_t> ranks) {
  Submission submission;
  submission.kind = OpKind::kAdoptProcessSet;
  submission.ranks = std::move(ranks);
  const Handle handle = engine.submit(std::move(submission));
  engine.wait(handle);
  return handle->created_set();
}

Submission gather(std::vector<float>& values, std::vector<float>& result) {
  Submission submission = allreduce("rows", values);
  submission.kind = OpKind::kAllgather;
  submission.allocate = [&result](size_t, const Dims& shape) {
    result.assign(static_cast<size_t>(numel(shape)), -1.0F);
    return contiguous_view(result.data(), DataType::kFloat32, shape);
  };
  return submission;
}

class EngineJoin : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, EngineJoin, ::testing::Values(1, 2, 3, 5));

// Rank r has r + 1 batches (or the other way round). Sizes from one chunk to many, fused and alone; the values are
// those of the ranks that still have data, and the averages are over all.
TEST_P(EngineJoin, UnevenBatchesForSeveralEpochs) {
  const int n = GetParam();
  with_engines(n, [n](Engine& engine) {
    for (int epoch = 0; epoch < 4; ++epoch) {
      const auto batches = [&](int rank) { return 2 * (epoch % 2 == 0 ? rank + 1 : n - rank); };
      for (int batch = 0; batch < batches(engine.rank()); ++batch) {
        int here = 0;
        for (int rank = 0; rank < n; ++rank) here += batch < batches(rank) ? 1 : 0;
        std::vector<float> small(3, 1.0F), medium(2000, 1.0F), large(300'000, 1.0F), average(5, 1.0F);
        std::vector<Handle> handles;
        handles.push_back(engine.submit(allreduce("small", small)));
        handles.push_back(engine.submit(allreduce("medium", medium)));
        handles.push_back(engine.submit(allreduce("large", large)));
        handles.push_back(engine.submit(allreduce("average", average, ReduceOp::kAverage)));
        engine.wait_all(handles);
        const auto sum = static_cast<float>(here);
        ASSERT_EQ(small, std::vector<float>(3, sum));
        ASSERT_EQ(medium, std::vector<float>(2000, sum));
        ASSERT_EQ(large, std::vector<float>(300'000, sum));
        ASSERT_EQ(average, std::vector<float>(5, sum / static_cast<float>(n)));
      }
      const int64_t last = join_and_wait(engine);
      if (n > 1 && epoch % 2 == 0) {
        EXPECT_EQ(last, n - 1);
      }
      std::vector<float> all(7, 1.0F);
      engine.wait(engine.submit(allreduce("all", all)));
      ASSERT_EQ(all, std::vector<float>(7, static_cast<float>(n)));
    }
  });
}

TEST(Engine, EveryKindWithARankThatHasJoined) {
  with_engines(3, [](Engine& engine) {
    for (int joined = 0; joined < 3; ++joined) {
      const int other = joined == 0 ? 1 : 0;
      if (engine.rank() != joined) {
        const auto mine = static_cast<float>(engine.rank() + 1);
        const float both = 6.0F - static_cast<float>(joined + 1);
        std::vector<float> values(4, mine), result;
        for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
          values.assign(4, mine);
          engine.wait(engine.submit(allreduce("reduced", values, op)));
          const float low = static_cast<float>(other + 1), high = both - low;
          const float expected = op == ReduceOp::kMin ? low : op == ReduceOp::kMax ? high : low * high;
          ASSERT_EQ(values, std::vector<float>(4, expected));
        }

        values.assign(4, mine);
        engine.wait(engine.submit(gather(values, result)));
        std::vector<float> expected(4, static_cast<float>(other + 1));
        expected.insert(expected.end(), 4, both - static_cast<float>(other + 1));
        ASSERT_EQ(result, expected);

        values.assign(3, mine);
        Submission exchange = gather(values, result);
        exchange.kind = OpKind::kAlltoall;
        exchange.extents = {1, 1, 1};  // what is for the joined rank is dropped
        const Handle handle = engine.submit(std::move(exchange));
        engine.wait(handle);
        ASSERT_EQ(result, (std::vector<float>{static_cast<float>(other + 1), both - static_cast<float>(other + 1)}));
        std::vector<int64_t> received = {1, 1, 1};
        received[static_cast<size_t>(joined)] = 0;
        ASSERT_EQ(handle->extents(), received);

        values.assign(4, mine);
        result.assign(engine.rank() == 0 ? 2 : 1, 0.0F);
        Submission scatter = allreduce("scattered", values);
        scatter.kind = OpKind::kReduceScatter;
        scatter.tensors[0].output =
            contiguous_view(result.data(), DataType::kFloat32, {static_cast<int64_t>(result.size())});
        engine.wait(engine.submit(std::move(scatter)));
        ASSERT_EQ(result, std::vector<float>(result.size(), both));

        values.assign(4, mine);
        Submission broadcast = allreduce("sent", values);
        broadcast.kind = OpKind::kBroadcast;
        broadcast.root = other;
        engine.wait(engine.submit(std::move(broadcast)));
        ASSERT_EQ(values, std::vector<float>(4, static_cast<float>(other + 1)));

        broadcast = allreduce("not sent", values);
        broadcast.kind = OpKind::kBroadcast;
        broadcast.root = joined;
        const Error error = error_of([&] { engine.wait(engine.submit(std::move(broadcast))); });
        ASSERT_EQ(error.code(), ErrorCode::kInvalidArgument);
        ASSERT_EQ(error.rank(), joined);
      }
      join_and_wait(engine);
    }
  });
}

TEST(Engine, AJoinIsAsynchronous) {
  with_engines(2, [](Engine& engine) {
    std::vector<float> values(100, 1.0F), other(100, 1.0F);
    if (engine.rank() == 1) {
      const Handle before = engine.submit(allreduce("before", values));
      const Handle joined = join(engine);
      EXPECT_EQ(error_of([&] { engine.wait(engine.submit(allreduce("x", other))); }).code(),
                ErrorCode::kInvalidArgument);
      engine.wait(before);
      EXPECT_EQ(values, std::vector<float>(100, 2.0F));
      engine.wait(joined);
      return;
    }
    engine.wait(engine.submit(allreduce("before", values)));
    EXPECT_EQ(values, std::vector<float>(100, 2.0F));
    engine.wait(engine.submit(allreduce("x", other)));
    EXPECT_EQ(other, std::vector<float>(100, 1.0F));
    EXPECT_EQ(join_and_wait(engine), 0);
  });
}

TEST(Engine, LeavingRightAfterAJoinDisturbsNobody) {
  for (int round = 0; round < 20; ++round) {
    auto engines = make_engines(3);
    on_ranks(3, [&](int rank) {
      Engine& engine = *engines[static_cast<size_t>(rank)];
      std::vector<float> values(100'000, 1.0F);
      if (rank == round % 3) engine.wait(engine.submit(allreduce("last", values)));
      join_and_wait(engine);
      engine.shutdown(true, "done");
      EXPECT_EQ(values, std::vector<float>(100'000, 1.0F));
    });
  }
}

TEST(Engine, ARankThatLeavesWhileOthersHaveJoinedIsNamed) {
  auto engines = make_engines(3);
  on_ranks(3, [&](int rank) {
    Engine& engine = *engines[static_cast<size_t>(rank)];
    if (rank == 1) {
      std::vector<float> values(10, 1.0F);
      engine.wait(engine.submit(allreduce("x", values)));  // the others have joined by now
      engine.shutdown(false, "ValueError: bad batch");
      return;
    }
    const Error error = error_of([&] { join_and_wait(engine); });
    EXPECT_EQ(error.code(), ErrorCode::kPeerLost);
    EXPECT_EQ(error.rank(), 1);
    EXPECT_NE(std::string(error.what()).find("bad batch"), std::string::npos) << error.what();
  });
}

// A follower that waits in a join hears nothing from rank 0 for longer than the abort time, and does not mind.
TEST(Engine, AJoinOutlivesTheStallTimeWhileOthersWork) {
  Config config;
  config.stall_check_seconds = 0;
  config.stall_abort_seconds = 0.3;
  with_engines(
      3,
      [](Engine& engine) {
        if (engine.rank() == 0) {
          const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(1500);
          std::vector<float> values(10, 1.0F);
          while (std::chrono::steady_clock::now() < until) {
            engine.wait(engine.submit(allreduce("x", values)));
            std::this_thread::sleep_for(std::chrono::milliseconds(50));
          }
        }
        EXPECT_EQ(join_and_wait(engine), 0);
      },
      config);
}

TEST(Engine, GroupsAdoptSetsAtTheSameTime) {
  with_engines(4, [](Engine& engine) {
    std::mt19937 random(static_cast<unsigned>(engine.rank()));
    for (int round = 0; round < 10; ++round) {
      const int rank = engine.rank();
      const std::vector<int32_t> pair = rank < 2 ? std::vector<int32_t>{0, 1} : std::vector<int32_t>{2, 3};
      const uint32_t set = adopt(engine, pair);
      EXPECT_EQ(engine.members(set), pair);
      std::vector<float> values(1000, static_cast<float>(rank));
      engine.wait(engine.submit(in_set(set, allreduce("x", values))));
      ASSERT_EQ(values, std::vector<float>(1000, rank < 2 ? 1.0F : 5.0F));
      EXPECT_EQ(adopt(engine, pair), set);
      EXPECT_EQ(adopt(engine, {0, 1, 2, 3}), 0u);

      Submission removal;  // of both, by all, in one order
      for (const int32_t first : {0, 2}) {
        uint32_t victim = 0;
        for (uint32_t id = 1; victim == 0; ++id) {
          try {
            if (engine.members(id).front() == first) victim = id;
          } catch (const Error&) {
          }
          ASSERT_LT(id, 100u);
        }
        removal.kind = OpKind::kRemoveProcessSet;
        removal.name = "remove" + std::to_string(first);
        removal.process_set = victim;
        engine.wait(engine.submit(removal));
      }
    }
  });
}

}  // namespace
}  // namespace fusewire
