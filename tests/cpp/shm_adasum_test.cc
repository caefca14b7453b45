// Adasum against its rule in long double, along the tree of Note [Adasum tree], on the vectors themselves and not on
// their Gram matrix; and the same bits on every rank, however tensors are cut and fused.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "adasum_case.h"
#include "collective/adasum.h"
#include "shm_world.h"

namespace fusewire::testing {
namespace {

// The results, which must be the same on all ranks.
Rows run(const Job& job) {
  std::vector<Rows> results(static_cast<size_t>(job.size()));
  ShmOptions options;
  options.chunk_bytes = job.chunk_bytes;
  options.spin = std::chrono::microseconds(job.spin);
  const std::string faults = run_threads(job.size(), options, [&](int rank, Backend& backend) {
    return run_on_rank(job, rank, backend, results[static_cast<size_t>(rank)]);
  });
  EXPECT_EQ(faults, "");
  for (const Rows& rows : results) EXPECT_TRUE(rows == results.front()) << "ranks differ";
  return results.front();
}

void expect_rule(const Job& job) { expect_rule(job, run(job)); }

class ShmAdasum : public ::testing::TestWithParam<int> {};
#if defined(__SANITIZE_THREAD__)
INSTANTIATE_TEST_SUITE_P(Ranks, ShmAdasum, ::testing::Values(2, 3));
#else
INSTANTIATE_TEST_SUITE_P(Ranks, ShmAdasum, ::testing::Values(1, 2, 3, 4, 5, 6, 7, 8));
#endif

TEST_P(ShmAdasum, FollowsTheRuleInEveryTypeAndLayout) {
  for (const DataType dtype : kFloatingTypes) {
    for (const bool mixed : {false, true}) {
      Job job = random_job(GetParam(), dtype, {1, 17, 0, 1000, 5000, 3, 12'000});
      job.mixed = mixed;
      job.spin = mixed ? 20 : 0;
      expect_rule(job);
      job.chunk_bytes = 0;
      expect_rule(job);
      job.prescale = -0.5;
      job.postscale = 3.0;
      expect_rule(job);
    }
    expect_rule(random_job(GetParam(), dtype, {9, 200}));  // small: at once
  }
}

TEST_P(ShmAdasum, AbsentRanksAreZeroVectors) {
  for (const DataType dtype : kFloatingTypes) {
    Job job = random_job(GetParam(), dtype, {10, 3000, 40});
    for (size_t t = 0; t < job.inputs.size(); ++t) {
      for (size_t rank = 0; rank < job.inputs[t].size(); ++rank) {
        if (mix(t * 8 + rank) % 2 == 0) job.inputs[t][rank].clear();
      }
    }
    for (Wide& input : job.inputs[2]) input.clear();  // absent on all
    expect_rule(job);
    job.chunk_bytes = 0;
    expect_rule(job);
  }
}

TEST_P(ShmAdasum, CompressionNarrowsAtPacking) {
  Job job = random_job(GetParam(), DataType::kFloat32, {10, 3000, 40});
  job.wire = DataType::kFloat16;
  job.prescale = 0.25;
  job.postscale = 4.0;
  job.mixed = true;
  expect_rule(job);
  job.dtype = DataType::kFloat64;
  job.wire = DataType::kBFloat16;
  expect_rule(job);
}

TEST_P(ShmAdasum, EqualVectorsStayWhatTheyAre) {
  for (const DataType dtype : kFloatingTypes) {
    const Wide vector = random_vector(5000, 3);
    Job job = given(dtype, std::vector<Wide>(static_cast<size_t>(GetParam()), vector));
    expect_rule(job);
    if (dtype == DataType::kFloat64 && GetParam() > 4) continue;  // three eighths of a double are rounded
    std::vector<std::byte> row(5000 * size_of(dtype));
    write(dtype, row, vector);
    EXPECT_TRUE(run(job)[0] == row);
    job.chunk_bytes = 0;
    EXPECT_TRUE(run(job)[0] == row);
  }
}

TEST_P(ShmAdasum, OrthogonalVectorsAreAdded) {
  const auto n = static_cast<size_t>(GetParam());
  std::vector<Wide> inputs(n, Wide(8 * 700, 0.0L));
  for (size_t i = 0; i < 8 * 700; ++i) {
    if (i % 8 < n) inputs[i % 8][i] = static_cast<double>(i) + 1;
  }
  const Rows result = run(given(DataType::kFloat32, inputs));
  for (size_t i = 0; i < 8 * 700; ++i) {
    EXPECT_EQ(read_floating(DataType::kFloat32, result[0].data(), i), i % 8 < n ? static_cast<double>(i) + 1 : 0.0);
  }
}

TEST_P(ShmAdasum, ZerosOppositesAndTinyValues) {
  const auto n = static_cast<size_t>(GetParam());
  for (const DataType dtype : kFloatingTypes) {
    const Wide vector = random_vector(3000, 5);
    Wide opposite = vector;
    for (long double& x : opposite) x = -x;
    const Wide zero(3000, 0.0L);
    std::vector<Wide> alternating;
    std::vector<Wide> one_zero(n, vector);
    for (size_t rank = 0; rank < n; ++rank) alternating.push_back(rank % 2 == 0 ? vector : opposite);
    one_zero[n / 2] = zero;
    expect_rule(given(dtype, std::vector<Wide>(n, zero)));
    expect_rule(given(dtype, alternating));
    expect_rule(given(dtype, one_zero));
  }
  expect_rule(random_job(GetParam(), DataType::kFloat32, {50, 3000}, 1e-30));
  expect_rule(random_job(GetParam(), DataType::kFloat32, {50, 3000}, 1e37));
  expect_rule(random_job(GetParam(), DataType::kFloat16, {10'000}, 300));
  expect_rule(random_job(GetParam(), DataType::kBFloat16, {10'000}, 300));
}

// Squares that leave fp64: the rule does not, in the long double of the reference.
TEST_P(ShmAdasum, DoublesWhoseSquaresLeaveTheRange) {
  for (const double size : {1e-200, 1e-290, 1e200, 1e300}) {
    expect_rule(random_job(GetParam(), DataType::kFloat64, {50, 3000}, size));
    Job job = random_job(GetParam(), DataType::kFloat64, {50, 3000, 70});
    for (Wide& input : job.inputs[1]) input.clear();  // others in the bucket are ordinary
    for (auto& tensor : job.inputs) {
      for (long double& x : tensor[0]) x *= size;  // one rank is far from the others
    }
    expect_rule(job);
    job.inputs[0].back().assign(50, 0.0L);
    expect_rule(job);
  }
}

TEST_P(ShmAdasum, BitsDoNotDependOnFusionAndChunks) {
  for (const DataType dtype : kFloatingTypes) {
    Job alone = random_job(GetParam(), dtype, {20'000});
    const Rows result = run(alone);
    Job fused = random_job(GetParam(), dtype, {77, 9000, 1, 20'000, 5});
    fused.inputs[3] = alone.inputs[0];
    for (const int64_t chunk_bytes : {0, 5000, 20'000}) {
      fused.chunk_bytes = chunk_bytes;
      EXPECT_TRUE(run(fused)[3] == result[0]) << to_string(dtype) << " chunk " << chunk_bytes;
    }
  }
}

TEST_P(ShmAdasum, InfAndNanStayInTheirTensor) {
  for (const DataType dtype : kFloatingTypes) {
    for (const long double poison :
         {std::numeric_limits<long double>::infinity(), std::numeric_limits<long double>::quiet_NaN()}) {
      Job job = random_job(GetParam(), dtype, {40, 3000, 40});
      const Rows clean = run(job);
      job.inputs[1].back()[1234] = poison;
      const Rows result = run(job);
      EXPECT_TRUE(result[0] == clean[0] && result[2] == clean[2]);
      EXPECT_FALSE(std::isfinite(read_floating(dtype, result[1].data(), 1234)));
      if (job.size() == 1) continue;
      EXPECT_TRUE(std::isnan(read_floating(dtype, result[1].data(), 0))) << "a sum, silently";
    }
  }
}

TEST(AdasumTree, AnInfinityHasNotCancelled) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  for (const double product : {kInfinity, -kInfinity}) {
    const AdasumCombination poisoned = adasum_combination({kInfinity, product, 1}, {0, 0});
    EXPECT_TRUE(std::isnan(poisoned.coefficients[0]) || std::isnan(poisoned.coefficients[1])) << product;
  }
  // Beside a zero vector it is itself.
  const AdasumCombination alone = adasum_combination({kInfinity, std::nan(""), 0}, {0, 0});
  EXPECT_EQ(alone.coefficients, (std::vector<double>{1, 1}));
}

TEST(AdasumTree, CancelledVectorsCountAsZero) {
  // c = -(a + b) / sqrt(2) of orthonormal a and b: adasum(a, b) = a + b, which c meets in direction.
  const double h = std::sqrt(0.5);
  const AdasumCombination parallel = adasum_combination({1, 0, -h, 1, -h, 1}, {0, 0, 0});
  for (const double c : parallel.coefficients) EXPECT_TRUE(std::isfinite(c));
  // a, then -a with an error in the last place, then b: what is left of the first two does not turn b around.
  const double near = std::nextafter(1.0, 2.0);
  const AdasumCombination rest = adasum_combination({1, 0, -near, 1, 0, 1}, {0, 0, 0});
  EXPECT_NEAR(rest.coefficients[0], 1.5, 1e-12);
  EXPECT_NEAR(rest.coefficients[1], 1.0, 1e-12);
  EXPECT_NEAR(rest.coefficients[2], 1.5, 1e-12);
}

}  // namespace
}  // namespace fusewire::testing
