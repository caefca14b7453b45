// What a data plane tells about its steps: each one's own kind, in order of time, inside the bucket.
#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "shm_world.h"

namespace fusewire::testing {
namespace {

struct Steps final : ChunkTrace {
  std::set<ChunkStep> seen;
  Clock::time_point last{};
  bool ordered = true;

  void chunk(ChunkStep step, Clock::time_point begin, Clock::time_point end, int64_t from, int64_t to) override {
    seen.insert(step);
    ordered = ordered && begin >= last && end >= begin && 0 <= from && from < to;
    last = end;
  }
};

// The steps that both of two ranks went through, waits left out.
std::set<ChunkStep> steps_of(OpKind kind, ReduceOp op, int64_t count, int64_t direct_bytes) {
  std::set<ChunkStep> seen[2];
  ShmOptions options;
  options.direct_bytes = direct_bytes;
  EXPECT_EQ(run_threads(2, options,
                        [&](int rank, Backend& backend) -> std::string {
                          std::vector<float> in(static_cast<size_t>(count), 1.0f);
                          std::vector<float> out(static_cast<size_t>(2 * count));
                          Steps steps;
                          Bucket bucket;
                          bucket.kind = kind;
                          bucket.op = op;
                          bucket.elements = count;
                          bucket.trace = &steps;
                          const bool gathers = kind == OpKind::kAllgather;
                          bucket.segments = {
                              {contiguous_view(in.data(), DataType::kFloat32, {count}),
                               contiguous_view(out.data(), DataType::kFloat32, {gathers ? 2 * count : count})}};
                          if (gathers) bucket.segments[0].counts = {count, count};
                          backend.run(bucket);
                          seen[rank] = steps.seen;
                          return steps.ordered ? "" : "out of order";
                        }),
            "");
  seen[0].erase(ChunkStep::kWait);
  seen[1].erase(ChunkStep::kWait);
  EXPECT_EQ(seen[0], seen[1]);
  return seen[0];
}

using Set = std::set<ChunkStep>;

TEST(ShmTrace, EveryAlgorithmNamesItsSteps) {
  constexpr int64_t kNever = int64_t{1} << 40;
  const Set gathered = {ChunkStep::kPack, ChunkStep::kUnpack};
  EXPECT_EQ(steps_of(OpKind::kAllgather, ReduceOp::kSum, 50'000, kNever), gathered);
  EXPECT_EQ(steps_of(OpKind::kAllgather, ReduceOp::kSum, 50'000, 1), gathered);
  const Set at_once = {ChunkStep::kPack, ChunkStep::kReduce};
  const Set sliced = {ChunkStep::kPack, ChunkStep::kReduce, ChunkStep::kUnpack};
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAdasum}) {
    EXPECT_EQ(steps_of(OpKind::kAllreduce, op, 10, 0), at_once);
    EXPECT_EQ(steps_of(OpKind::kAllreduce, op, 50'000, 0), sliced);
  }
}

}  // namespace
}  // namespace fusewire::testing
