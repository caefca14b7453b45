// The same random program on every rank, each in an order of its own: all kinds, explicit groups, absences, overlapping
// process sets, uneven epochs that end in a join, a cache too small for it, buckets fused and alone. What every
// operation must give follows from the program.
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "thread_ranks.h"

namespace fusewire {
namespace {

using testing::with_engines;

constexpr int kOperations = 12;  // at once

// One operation as all ranks know it. Rank r's values are all r + 1.
struct Plan {
  OpKind kind = OpKind::kAllreduce;
  std::string name;
  size_t set = 0;  // index into the sets below
  int root = 0;
  int64_t columns = 1;
  std::vector<int64_t> rows;                 // that a rank brings
  std::vector<std::vector<int64_t>> splits;  // rows[r], cut for the members
  std::vector<bool> absent;
};

class Program {
 public:
  Program(int ranks, unsigned seed) : n(ranks), random(seed) {
    std::vector<int32_t> everybody(static_cast<size_t>(n));
    std::iota(everybody.begin(), everybody.end(), 0);
    sets = {everybody, {0, n - 1}, {everybody.begin() + 1, everybody.end()}};
    if (n == 1) sets.resize(1);
  }

  std::vector<int> batches() {
    std::vector<int> result(static_cast<size_t>(n));
    for (int& count : result) count = below(4);
    return result;
  }

  Plan plan(int number) {
    Plan plan;
    plan.kind = static_cast<OpKind>(number % 5);
    plan.name = "t" + std::to_string(number);
    plan.set = static_cast<size_t>(below(static_cast<int>(sets.size())));
    const std::vector<int32_t>& members = sets[plan.set];
    plan.root = members[static_cast<size_t>(below(static_cast<int>(members.size())))];
    plan.columns = below(3) == 0 ? 1000 : 1 + below(3);
    const bool rare = below(3) == 0;
    for (int rank = 0; rank < n; ++rank) {
      plan.splits.emplace_back();
      for (size_t i = 0; i < members.size(); ++i) plan.splits.back().push_back(below(4));
      plan.rows.push_back(std::accumulate(plan.splits.back().begin(), plan.splits.back().end(), int64_t{0}));
      if (!has_extents(plan.kind)) plan.rows.back() = plan.rows.front();
      plan.absent.push_back(rare && below(3) > 0);
    }
    return plan;
  }

  int below(int bound) { return static_cast<int>(random() % static_cast<unsigned>(bound)); }

  const int n;
  std::vector<std::vector<int32_t>> sets;

 private:
  std::mt19937 random;
};

// One rank's part in one operation.
class Operation {
 public:
  Operation(const Plan& plan, const std::vector<int32_t>& members, const std::vector<bool>& working, int rank)
      : plan_(plan), members_(members), working_(working), rank_(rank) {}

  bool mine() const { return std::binary_search(members_.begin(), members_.end(), rank_); }

  void submit(Engine& engine, uint32_t set) {
    const int64_t rows = plan_.rows[at(rank_)];
    values_.assign(static_cast<size_t>(rows * plan_.columns), static_cast<float>(rank_ + 1));
    Submission submission;
    submission.kind = plan_.kind;
    submission.name = plan_.name;
    submission.process_set = set;
    submission.root = plan_.root;
    SubmittedTensor& tensor = submission.tensors.emplace_back();
    tensor.input = contiguous_view(values_.data(), DataType::kFloat32, {rows, plan_.columns});
    tensor.absent = plan_.absent[at(rank_)];
    if (tensor.absent) tensor.input.data = nullptr;
    if (plan_.kind == OpKind::kAlltoall) submission.extents = plan_.splits[at(rank_)];
    if (has_extents(plan_.kind)) {
      submission.allocate = [this](size_t, const Dims& shape) {
        ++allocated_;
        result_.assign(static_cast<size_t>(numel(shape)), -1.0F);
        return contiguous_view(result_.data(), DataType::kFloat32, shape);
      };
    } else {
      result_.assign(static_cast<size_t>(out_rows() * plan_.columns), -1.0F);
      tensor.output = contiguous_view(result_.data(), DataType::kFloat32, {out_rows(), plan_.columns});
    }
    handle_ = engine.submit(std::move(submission), rank_ % 2 == 0);
  }

  const Handle& handle() const { return handle_; }

  void check() const {
    ASSERT_TRUE(handle_->done());
    if (plan_.kind == OpKind::kBroadcast && !working_[at(plan_.root)]) {
      ASSERT_FALSE(handle_->ok());
      ASSERT_EQ(handle_->error()->code(), ErrorCode::kInvalidArgument);
      return;
    }
    ASSERT_TRUE(handle_->ok()) << handle_->error()->what();
    const bool nobody = std::none_of(members_.begin(), members_.end(), [&](int r) { return brings(r); });
    ASSERT_EQ(handle_->skipped(), nobody ? std::vector<bool>{true} : std::vector<bool>{});
    ASSERT_EQ(allocated_, has_extents(plan_.kind) ? 1 : 0) << to_string(plan_.kind) << " on rank " << rank_;
    std::vector<float> expected;
    switch (plan_.kind) {
      case OpKind::kAllgather:
      case OpKind::kAlltoall:
        for (const int member : members_) {
          const int64_t rows =
              plan_.kind == OpKind::kAllgather ? plan_.rows[at(member)] : plan_.splits[at(member)][me()];
          if (brings(member)) expected.insert(expected.end(), size(rows), static_cast<float>(member + 1));
        }
        break;
      case OpKind::kBroadcast:
        expected.assign(size(out_rows()), brings(plan_.root) ? static_cast<float>(plan_.root + 1) : 0.0F);
        break;
      default: {
        float sum = 0;
        for (const int member : members_) sum += brings(member) ? static_cast<float>(member + 1) : 0.0F;
        expected.assign(size(out_rows()), sum);
      }
    }
    if (nobody && !has_extents(plan_.kind)) expected.assign(size(out_rows()), -1.0F);  // untouched
    ASSERT_EQ(result_, expected) << to_string(plan_.kind) << " on rank " << rank_;
  }

 private:
  static size_t at(int rank) { return static_cast<size_t>(rank); }
  size_t me() const {
    return at(static_cast<int>(std::lower_bound(members_.begin(), members_.end(), rank_) - members_.begin()));
  }
  size_t size(int64_t rows) const { return static_cast<size_t>(rows * plan_.columns); }
  bool brings(int rank) const { return working_[at(rank)] && !plan_.absent[at(rank)]; }
  int64_t out_rows() const {
    const int64_t rows = plan_.rows.front();
    if (plan_.kind != OpKind::kReduceScatter) return rows;
    const auto n = static_cast<int64_t>(members_.size());
    return rows / n + (static_cast<int64_t>(me()) < rows % n ? 1 : 0);
  }

  const Plan& plan_;
  const std::vector<int32_t>& members_;
  const std::vector<bool>& working_;
  const int rank_;
  std::vector<float> values_, result_;
  int allocated_ = 0;
  Handle handle_;
};

uint32_t adopt(Engine& engine, const std::vector<int32_t>& ranks) {
  Submission submission;
  submission.kind = OpKind::kAdoptProcessSet;
  submission.ranks = ranks;
  const Handle handle = engine.submit(std::move(submission));
  engine.wait(handle);
  return handle->created_set();
}

int64_t join(Engine& engine) {
  Submission submission;
  submission.kind = OpKind::kJoin;
  const Handle handle = engine.submit(std::move(submission));
  engine.wait(handle);
  return handle->extents().at(0);
}

void play(Engine& engine, unsigned seed) {
  const int rank = engine.rank();
  Program program(engine.size(), seed);
  std::mt19937 own(seed * 100 + static_cast<unsigned>(rank));
  std::vector<uint32_t> ids(program.sets.size());
  for (size_t set = 0; set < ids.size(); ++set) {
    const auto& ranks = program.sets[set];
    if (std::binary_search(ranks.begin(), ranks.end(), rank)) ids[set] = adopt(engine, ranks);
  }
  for (int epoch = 0; epoch < 6; ++epoch) {
    const std::vector<int> batches = program.batches();
    const int most = *std::max_element(batches.begin(), batches.end());
    for (int batch = 0; batch < most; ++batch) {
      std::vector<Plan> plans;
      for (int i = 0; i < kOperations; ++i) plans.push_back(program.plan(i));
      std::vector<bool> working;
      for (const int count : batches) working.push_back(batch < count);
      if (!working[static_cast<size_t>(rank)]) continue;
      std::vector<Operation> operations;
      for (const Plan& plan : plans) operations.emplace_back(plan, program.sets[plan.set], working, rank);
      std::vector<size_t> order(operations.size());
      std::iota(order.begin(), order.end(), size_t{0});
      std::shuffle(order.begin(), order.end(), own);
      std::vector<Handle> handles;
      for (const size_t i : order) {
        if (!operations[i].mine()) continue;
        operations[i].submit(engine, ids[plans[i].set]);
        handles.push_back(operations[i].handle());
      }
      try {
        engine.wait_all(handles);
      } catch (const Error& error) {
        ASSERT_EQ(error.code(), ErrorCode::kInvalidArgument) << error.what();
      }
      for (const Operation& operation : operations) {
        if (!operation.mine()) continue;
        ASSERT_NO_FATAL_FAILURE(operation.check());
      }
    }
    const int64_t last = join(engine);
    ASSERT_LT(last, engine.size());
  }
}

class EngineProgram : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Seeds, EngineProgram, ::testing::Range(0, 40));

TEST_P(EngineProgram, EveryOperationGivesWhatFollowsFromTheProgram) {
  const auto seed = static_cast<unsigned>(GetParam());
  Config config;
  config.cache_capacity = std::vector<int64_t>{0, 1, 5, 4096}[seed % 4];
  config.fusion_threshold = std::vector<int64_t>{0, 5000, 1 << 20}[seed % 3];
  config.inline_limit = seed % 2 == 0 ? config.inline_limit : 0;
  with_engines(1 + GetParam() % 5, [&](Engine& engine) { play(engine, seed); }, config);
}

}  // namespace
}  // namespace fusewire
