// Operations whose ranks bring different numbers of rows, from submission to result.
#include <gtest/gtest.h>

#include <stdexcept>

#include "thread_ranks.h"

namespace fusewire {
namespace {

using testing::allreduce;
using testing::error_of;
using testing::make_engines;
using testing::on_ranks;
using testing::with_engines;

Submission uneven(OpKind kind, const std::string& name, std::vector<float>& values, Dims sizes) {
  Submission submission = allreduce(name, values);
  submission.kind = kind;
  submission.tensors[0].input = contiguous_view(values.data(), DataType::kFloat32, std::move(sizes));
  return submission;
}

// Where the engine makes the result of a one-tensor submission.
struct Received {
  std::vector<float> values;
  Dims shape;
  Allocator allocator() {
    return [this](size_t, const Dims& wanted) {
      shape = wanted;
      values.assign(static_cast<size_t>(numel(wanted)), -1.0F);
      return contiguous_view(values.data(), DataType::kFloat32, wanted);
    };
  }
};

TEST(EngineRows, Allgather) {
  with_engines(3, [](Engine& engine) {
    const int rank = engine.rank();
    for (int round = 0; round < 20; ++round) {
      const int64_t rows = (rank + round) % 4;
      std::vector<float> values(static_cast<size_t>(rows) * 2, static_cast<float>(rank));
      Received received;
      Submission submission = uneven(OpKind::kAllgather, "x", values, {rows, 2});
      submission.allocate = received.allocator();
      const Handle handle = engine.submit(std::move(submission), false);
      engine.wait(handle);
      std::vector<float> expected;
      std::vector<int64_t> extents;
      for (int r = 0; r < 3; ++r) {
        extents.push_back((r + round) % 4);
        expected.insert(expected.end(), static_cast<size_t>(extents.back()) * 2, static_cast<float>(r));
      }
      ASSERT_EQ(received.values, expected);
      ASSERT_EQ(handle->extents(), extents);
    }
  });
}

TEST(EngineRows, Alltoall) {
  with_engines(3, [](Engine& engine) {
    const int rank = engine.rank();
    for (int round = 0; round < 20; ++round) {
      std::vector<float> values;
      std::vector<int64_t> splits, expected_splits;
      std::vector<float> expected;
      for (int peer = 0; peer < 3; ++peer) {
        splits.push_back((rank * 3 + peer * 2 + round) % 4);
        values.insert(values.end(), static_cast<size_t>(splits.back()), static_cast<float>(10 * rank + peer));
        expected_splits.push_back((peer * 3 + rank * 2 + round) % 4);
        expected.insert(expected.end(), static_cast<size_t>(expected_splits.back()),
                        static_cast<float>(10 * peer + rank));
      }
      Received received;
      Submission submission = uneven(OpKind::kAlltoall, "x", values, {static_cast<int64_t>(values.size())});
      submission.extents = splits;
      submission.allocate = received.allocator();
      const Handle handle = engine.submit(std::move(submission));
      engine.wait(handle);
      ASSERT_EQ(received.values, expected);
      ASSERT_EQ(handle->extents(), expected_splits);
    }
  });
}

TEST(EngineRows, ReduceScatter) {
  with_engines(3, [](Engine& engine) {
    std::vector<float> values(10, static_cast<float>(engine.rank()));  // five rows: two, two, one
    std::vector<float> result(engine.rank() == 2 ? 2 : 4);
    Submission submission = uneven(OpKind::kReduceScatter, "x", values, {5, 2});
    submission.tensors[0].output =
        contiguous_view(result.data(), DataType::kFloat32, {static_cast<int64_t>(result.size()) / 2, 2});
    engine.wait(engine.submit(std::move(submission)));
    EXPECT_EQ(result, std::vector<float>(result.size(), 3.0F));
  });
}

// One that is absent brings no rows, whatever its tensor holds.
TEST(EngineRows, AnAbsentRankReceivesWhatTheOthersBring) {
  with_engines(3, [](Engine& engine) {
    std::vector<float> values(4, static_cast<float>(engine.rank()));
    Received received;
    Submission submission = uneven(OpKind::kAllgather, "x", values, {2, 2});
    submission.tensors[0].absent = engine.rank() == 1;
    submission.allocate = received.allocator();
    const Handle handle = engine.submit(std::move(submission));
    engine.wait(handle);
    EXPECT_EQ(received.values, (std::vector<float>{0, 0, 0, 0, 2, 2, 2, 2}));
    EXPECT_EQ(handle->extents(), (std::vector<int64_t>{2, 0, 2}));
  });
}

TEST(EngineRows, AResultThatNobodyWantsIsNotMade) {
  with_engines(2, [](Engine& engine) {
    std::vector<float> values(4, static_cast<float>(engine.rank()));
    Received received;
    Submission submission = uneven(OpKind::kAllgather, "x", values, {2, 2});
    if (engine.rank() == 0) submission.allocate = received.allocator();
    engine.wait(engine.submit(std::move(submission)));
    const std::vector<float> both = {0, 0, 0, 0, 1, 1, 1, 1};
    EXPECT_EQ(received.values, engine.rank() == 0 ? both : std::vector<float>());
  });
}

TEST(EngineRows, RowsThatMakeNoSenseAreRefusedAtOnce) {
  with_engines(2, [](Engine& engine) {
    std::vector<float> values(6, 1.0F);
    for (const OpKind kind : {OpKind::kAllgather, OpKind::kAlltoall, OpKind::kReduceScatter}) {
      const Error error = error_of([&] { engine.submit(uneven(kind, "x", values, {})); });
      EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
    }
    for (const std::vector<int64_t>& splits : {std::vector<int64_t>{1, 1}, {2, 2}, {4, -1}, {INT64_MAX, 4}, {}}) {
      Submission submission = uneven(OpKind::kAlltoall, "x", values, {3, 2});
      submission.extents = splits;
      EXPECT_EQ(error_of([&] { engine.submit(std::move(submission)); }).code(), ErrorCode::kInvalidArgument);
    }
    Submission three = uneven(OpKind::kAlltoall, "x", values, {3, 2});
    three.extents = {1, 1, 1};
    const Error error = error_of([&] { engine.wait(engine.submit(std::move(three))); });
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("3 splits for 1 tensor and 2 members"), std::string::npos) << error.what();
    engine.wait(engine.submit(allreduce("x", values)));
    EXPECT_EQ(values, std::vector<float>(6, 2));
  });
}

TEST(EngineRows, AnAllgatherThatNobodyContributesToIsEmpty) {
  with_engines(3, [](Engine& engine) {
    for (int round = 0; round < 3; ++round) {
      std::vector<float> values(6, 1.0F);
      Submission submission = uneven(OpKind::kAllgather, "x", values, {3, 2});
      submission.tensors[0].absent = true;
      std::vector<Dims> made;
      submission.allocate = [&made](size_t, const Dims& shape) {
        made.push_back(shape);
        return contiguous_view(nullptr, DataType::kFloat32, shape);
      };
      const Handle handle = engine.submit(std::move(submission));
      engine.wait(handle);
      EXPECT_EQ(made, std::vector<Dims>{Dims({0, 2})});
      EXPECT_EQ(handle->skipped(), std::vector<bool>{true});
      EXPECT_EQ(handle->extents(), (std::vector<int64_t>{0, 0, 0}));
    }
  });
}

TEST(EngineRows, NoMemoryForAResultFailsAllRanksAlike) {
  for (int blamed = 0; blamed < 3; ++blamed) {
    auto engines = make_engines(3);
    on_ranks(3, [&](int rank) {
      Engine& engine = *engines[static_cast<size_t>(rank)];
      std::vector<float> values(6, 1.0F), result(18);
      Submission submission = uneven(OpKind::kAllgather, "x", values, {3, 2});
      submission.allocate = [&](size_t, const Dims& shape) -> TensorView {
        if (rank == blamed) throw std::runtime_error("out of memory");
        return contiguous_view(result.data(), DataType::kFloat32, shape);
      };
      const Error error = error_of([&] { engine.wait(engine.submit(std::move(submission))); });
      EXPECT_EQ(error.code(), ErrorCode::kCollective);
      EXPECT_EQ(error.rank(), blamed);
      EXPECT_NE(std::string(error.what()).find("out of memory"), std::string::npos) << error.what();
    });
  }
}

}  // namespace
}  // namespace fusewire
