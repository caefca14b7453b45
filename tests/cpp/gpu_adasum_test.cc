// Adasum over NCCL, on doubles: any number of ranks, against the rule in long double, with the same bits on all ranks,
// in whatever order the GPUs do what they were asked for.
#include <gtest/gtest.h>

#include <limits>

#include "adasum_case.h"
#include "nccl_world.h"

namespace fusewire::testing {
namespace {

struct Outcome {
  Rows results;
  std::vector<size_t> launches;  // of rank 0, per kind
  size_t messages = 0;           // sends of rank 0
};

// The results, which must be the same on all ranks. Nothing may have been waited for.
Outcome run(const Job& job, uint64_t seed = 1, const NcclTuning& tuning = kSmallTuning) {
  std::vector<Rows> results(static_cast<size_t>(job.size()));
  Outcome outcome;
  const std::string faults = with_nccl(job.size(), seed, [&](int rank, NcclRank& self, Backend& cpu) -> std::string {
    self.start(cpu, {.rank = rank, .size = job.size()}, tuning);
    std::string fault = run_on_rank(job, rank, *self.to_the_end, results[static_cast<size_t>(rank)]);
    if (rank == 0) {
      for (const char* kind : {"pack", "unpack", "dot", "combine", "reduce"}) {
        outcome.launches.push_back(self.gpu.cuda->launched(kind));
      }
      outcome.messages = self.nccl.called("send");
    }
    return fault;
  });
  EXPECT_EQ(faults, "");
  for (const Rows& rows : results) EXPECT_TRUE(rows == results.front()) << "ranks differ";
  outcome.results = results.front();
  return outcome;
}

// Vectors of the tree are rounded to fp32 at every level.
void expect_rule(const Job& job, uint64_t seed = 1) {
  const long double lost = job.wire == DataType::kFloat64 ? 1e-12L : 8 * 0x1p-24L;
  expect_rule(job, run(job, seed).results, lost);
}

class GpuAdasum : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, GpuAdasum, ::testing::Values(1, 2, 3, 4, 7, 8));

TEST_P(GpuAdasum, FollowsTheRuleInEveryTypeAndLayout) {
  for (const DataType dtype : kFloatingTypes) {
    for (const bool mixed : {false, true}) {
      Job job = random_job(GetParam(), dtype, {1, 17, 0, 300, 33, 3, 1100});
      job.mixed = mixed;
      expect_rule(job, mixed ? 2 : 3);
      job.prescale = -0.5;
      job.postscale = 3.0;
      expect_rule(job, 4);
    }
  }
}

TEST_P(GpuAdasum, AbsentRanksAreZeroVectors) {
  for (const DataType dtype : kFloatingTypes) {
    Job job = random_job(GetParam(), dtype, {10, 900, 40});
    for (size_t t = 0; t < job.inputs.size(); ++t) {
      for (size_t rank = 0; rank < job.inputs[t].size(); ++rank) {
        if (mix(t * 8 + rank) % 2 == 0) job.inputs[t][rank].clear();
      }
    }
    for (Wide& input : job.inputs[2]) input.clear();  // absent on all
    expect_rule(job);
  }
}

TEST_P(GpuAdasum, CompressionNarrowsAtPacking) {
  Job job = random_job(GetParam(), DataType::kFloat32, {10, 900, 40});
  job.wire = DataType::kFloat16;
  job.prescale = 0.25;
  job.postscale = 4.0;
  job.mixed = true;
  expect_rule(job);
  job.dtype = DataType::kFloat64;
  job.wire = DataType::kBFloat16;
  expect_rule(job);
}

TEST_P(GpuAdasum, EqualVectorsStayWhatTheyAre) {
  for (const DataType dtype : kFloatingTypes) {
    const Wide vector = random_vector(1500, 3);
    std::vector<std::byte> row(1500 * size_of(dtype));
    write(dtype, row, vector);
    const Job job = given(dtype, std::vector<Wide>(static_cast<size_t>(GetParam()), vector));
    EXPECT_TRUE(run(job).results[0] == row) << to_string(dtype);
  }
}

TEST_P(GpuAdasum, OrthogonalVectorsAreAdded) {
  const auto n = static_cast<size_t>(GetParam());
  std::vector<Wide> inputs(n, Wide(8 * 100, 0.0L));
  for (size_t i = 0; i < 8 * 100; ++i) {
    if (i % 8 < n) inputs[i % 8][i] = static_cast<double>(i) + 1;
  }
  const Rows result = run(given(DataType::kFloat32, inputs)).results;
  for (size_t i = 0; i < 8 * 100; ++i) {
    EXPECT_EQ(read_floating(DataType::kFloat32, result[0].data(), i), i % 8 < n ? static_cast<double>(i) + 1 : 0.0);
  }
}

TEST_P(GpuAdasum, ZerosOppositesAndTinyValues) {
  const auto n = static_cast<size_t>(GetParam());
  for (const DataType dtype : {DataType::kBFloat16, DataType::kFloat32}) {
    const Wide vector = random_vector(300, 5);
    Wide opposite = vector;
    for (long double& x : opposite) x = -x;
    const Wide zero(300, 0.0L);
    std::vector<Wide> alternating;
    std::vector<Wide> one_zero(n, vector);
    for (size_t rank = 0; rank < n; ++rank) alternating.push_back(rank % 2 == 0 ? vector : opposite);
    one_zero[n / 2] = zero;
    expect_rule(given(dtype, std::vector<Wide>(n, zero)));
    if (n != 3 && n != 7) expect_rule(given(dtype, alternating));  // others do not cancel exactly
    expect_rule(given(dtype, one_zero));
  }
  expect_rule(random_job(GetParam(), DataType::kFloat32, {50, 400}, 1e-30));
  expect_rule(random_job(GetParam(), DataType::kFloat32, {50, 400}, 1e37));
  expect_rule(random_job(GetParam(), DataType::kFloat16, {10'000}, 300));
  expect_rule(random_job(GetParam(), DataType::kBFloat16, {10'000}, 300));
  expect_rule(random_job(GetParam(), DataType::kFloat64, {50, 400}, 1e-100));
}

// Vectors of the tree may leave the range of a half type where the scaled result does not.
TEST_P(GpuAdasum, RoundsHalfTypesAtTheEnd) {
  Job job = random_job(GetParam(), DataType::kFloat16, {500}, 30'000);
  job.postscale = 1.0 / 8;
  expect_rule(job);
}

TEST_P(GpuAdasum, InfAndNanStayInTheirTensor) {
  for (const DataType dtype : {DataType::kBFloat16, DataType::kFloat32}) {
    for (const long double poison :
         {std::numeric_limits<long double>::infinity(), std::numeric_limits<long double>::quiet_NaN()}) {
      Job job = random_job(GetParam(), dtype, {40, 300, 40});
      const Rows clean = run(job).results;
      job.inputs[1].back()[123] = poison;
      const Rows result = run(job).results;
      EXPECT_TRUE(result[0] == clean[0] && result[2] == clean[2]);
      EXPECT_FALSE(std::isfinite(read_floating(dtype, result[1].data(), 123)));
      if (job.size() == 1) continue;
      EXPECT_TRUE(std::isnan(read_floating(dtype, result[1].data(), 0))) << "a sum, silently";
    }
  }
}

// What does not fit fp64's squares counts as zero, so it is added (and not scaled away, or NaN).
TEST(GpuAdasumRange, TinyDoublesAreAdded) {
  const Job job = random_job(2, DataType::kFloat64, {50}, 1e-200);
  const Rows result = run(job).results;
  for (size_t i = 0; i < 50; ++i) {
    const double sum = static_cast<double>(job.inputs[0][0][i]) + static_cast<double>(job.inputs[0][1][i]);
    EXPECT_EQ(read_floating(DataType::kFloat64, result[0].data(), i), sum);
  }
}

// Rows of several tensors, and one that is larger than the buffer: never cut.
TEST_P(GpuAdasum, ATensorLargerThanTheBufferIsOneVector) {
  const Job job = random_job(GetParam(), DataType::kFloat32, {100, 900, 5000, 7, 3});
  const Rows small = run(job).results;
  const Rows large = run(job, 2, NcclTuning{}).results;
  expect_rule(job, small, 8 * 0x1p-24L);
  expect_rule(job, large, 8 * 0x1p-24L);
}

// However many tensors: per level of the tree one dot, one combine, one sum of dot products, two exchanges.
TEST(GpuAdasumLaunches, DoNotCountTensors) {
  for (const size_t tensors : {size_t{1}, size_t{60}}) {
    const std::vector<size_t> counts(tensors, 210);
    const Outcome fp32 = run(random_job(8, DataType::kFloat32, counts), 1, NcclTuning{});
    EXPECT_EQ(fp32.launches, (std::vector<size_t>{1, 1, 3, 3, 3}));
    EXPECT_EQ(fp32.messages, 3u + 1 + 3 + 7);  // halves to three partners, dot products to 1, 3 and 7 others
    const Outcome bf16 = run(random_job(8, DataType::kBFloat16, counts), 1, NcclTuning{});
    EXPECT_EQ(bf16.launches, (std::vector<size_t>{2, 2, 3, 3, 3}));  // widened, and narrowed again
    const Outcome odd = run(random_job(3, DataType::kFloat32, counts), 1, NcclTuning{});
    EXPECT_EQ(odd.launches, (std::vector<size_t>{1, 1, 2, 2, 1}));  // the extra's vector lies in one place
  }
}

// Any set of ranks, one bucket after another, absent tensors and all, in many orders of work.
TEST(GpuAdasumOrders, ManyBucketsInManyOrders) {
  for (uint64_t seed = 1; seed <= 8; ++seed) {
    const int ranks = 2 + static_cast<int>(seed % 4);
    Job job = random_job(ranks, seed % 2 == 0 ? DataType::kFloat32 : DataType::kFloat16, {9, 300, 40, 700});
    job.inputs[seed % 4][1].clear();
    job.mixed = true;
    const Rows alone = run(job, seed).results;
    std::vector<Rows> twice(static_cast<size_t>(ranks));
    EXPECT_EQ(with_nccl(ranks, seed + 100,
                        [&](int rank, NcclRank& self, Backend& cpu) -> std::string {
                          self.start(cpu, {.rank = rank, .size = ranks});
                          for (int round = 0; round < 3; ++round) {
                            Rows rows;
                            std::string fault = run_on_rank(job, rank, *self.to_the_end, rows);
                            if (!fault.empty()) return fault;
                            if (rows != alone) return "not the same twice";
                          }
                          return "";
                        }),
              "");
  }
}

}  // namespace
}  // namespace fusewire::testing
