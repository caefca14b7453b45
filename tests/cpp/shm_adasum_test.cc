// Adasum against its rule in long double, along the tree of Note [Adasum tree], on the vectors themselves and not on
// their Gram matrix; and the same bits on every rank, however tensors are cut and fused.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "collective/adasum.h"
#include "kernels_data.h"
#include "shm_case.h"
#include "shm_world.h"

namespace fusewire::testing {
namespace {

using Wide = std::vector<long double>;

Wide adasum_of_two(const Wide& a, const Wide& b) {
  long double aa = 0;
  long double bb = 0;
  long double ab = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    aa += a[i] * a[i];
    bb += b[i] * b[i];
    ab += a[i] * b[i];
  }
  const bool plain = aa == 0 || bb == 0;
  Wide sum(a.size());
  for (size_t i = 0; i < a.size(); ++i) {
    sum[i] = plain ? a[i] + b[i] : (1 - ab / (2 * aa)) * a[i] + (1 - ab / (2 * bb)) * b[i];
  }
  return sum;
}

Wide adasum_rule(std::vector<Wide> vectors) {
  size_t whole = 1;
  while (whole * 2 <= vectors.size()) whole *= 2;
  for (size_t r = whole; r < vectors.size(); ++r) vectors[r - whole] = adasum_of_two(vectors[r - whole], vectors[r]);
  for (size_t d = 1; d < whole; d *= 2) {
    for (size_t i = 0; i < whole; i += 2 * d) vectors[i] = adasum_of_two(vectors[i], vectors[i + d]);
  }
  return vectors[0];
}

// What every rank brings to every tensor of a bucket, and how.
struct Job {
  DataType dtype = DataType::kFloat32;
  DataType wire = DataType::kFloat32;
  double prescale = 1.0;
  double postscale = 1.0;
  std::vector<std::vector<Wide>> inputs;  // [tensor][rank]; empty: absent
  std::vector<size_t> counts;             // [tensor]
  bool mixed = false;                     // layouts and in place or not
  int64_t chunk_bytes = 1024;
  int spin = 0;

  int size() const { return static_cast<int>(inputs.front().size()); }
};

void write(DataType dtype, std::vector<std::byte>& row, const Wide& values) {
  for (size_t i = 0; i < values.size(); ++i) {
    write_floating(dtype, row.data(), i, static_cast<double>(values[i]));
  }
}

using Rows = std::vector<std::vector<std::byte>>;  // [tensor]

// The results, which must be the same on all ranks.
Rows run(const Job& job) {
  std::vector<Rows> results(static_cast<size_t>(job.size()));
  ShmOptions options;
  options.chunk_bytes = job.chunk_bytes;
  options.spin = std::chrono::microseconds(job.spin);
  const std::string faults = run_threads(job.size(), options, [&](int rank, Backend& backend) -> std::string {
    Case dice;
    dice.mixed = job.mixed;
    Bucket bucket;
    bucket.op = ReduceOp::kAdasum;
    bucket.dtype = job.dtype;
    bucket.wire = job.wire;
    bucket.prescale = job.prescale;
    bucket.postscale = job.postscale;
    std::vector<OwnedTensor> inputs;
    std::vector<OwnedTensor> outputs;
    Rows before;
    for (size_t t = 0; t < job.inputs.size(); ++t) {
      const auto count = static_cast<int64_t>(job.counts[t]);
      const Dims sizes = count % 2 == 0 ? Dims{2, count / 2} : Dims{count};
      inputs.emplace_back(job.dtype, sizes, dice.layout(rank, t, 0));
      outputs.emplace_back(job.dtype, sizes, dice.layout(rank, t, 1));
      before.emplace_back(job.counts[t] * size_of(job.dtype));
      const Wide& values = job.inputs[t][static_cast<size_t>(rank)];
      write(job.dtype, before.back(), values);
      inputs.back().write(before.back().data());
    }
    for (size_t t = 0; t < job.inputs.size(); ++t) {
      const bool in_place = job.mixed && dice.in_place(rank, t);
      Segment segment{inputs[t].view(), in_place ? inputs[t].view() : outputs[t].view()};
      if (job.inputs[t][static_cast<size_t>(rank)].empty()) segment.input.data = nullptr;
      bucket.elements += segment.input.numel();
      bucket.segments.push_back(segment);
    }
    backend.run(bucket);
    for (size_t t = 0; t < job.inputs.size(); ++t) {
      const bool in_place = job.mixed && dice.in_place(rank, t);
      results[static_cast<size_t>(rank)].push_back((in_place ? inputs : outputs)[t].read());
      if (!in_place && inputs[t].read() != before[t]) return "input changed";
      if (!inputs[t].rest_untouched() || !outputs[t].rest_untouched()) return "wrote between elements";
    }
    return "";
  });
  EXPECT_EQ(faults, "");
  for (const Rows& rows : results) EXPECT_TRUE(rows == results.front()) << "ranks differ";
  return results.front();
}

long double unit(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat16:
      return 0x1p-11L;
    case DataType::kBFloat16:
      return 0x1p-8L;
    case DataType::kFloat32:
      return 0x1p-24L;
    default:
      return 0x1p-50L;
  }
}

// Within one rounding of the rule, plus what fp64 sums lose.
void expect_rule(const Job& job) {
  const Rows results = run(job);
  for (size_t t = 0; t < job.inputs.size(); ++t) {
    std::vector<Wide> vectors;
    Wide size(job.counts[t], 0.0L);
    for (const Wide& input : job.inputs[t]) {
      std::vector<std::byte> row(job.counts[t] * size_of(job.dtype));
      write(job.dtype, row, input);
      Wide vector(job.counts[t], 0.0L);
      for (size_t i = 0; i < job.counts[t]; ++i) {
        vector[i] = input.empty() ? 0.0L : read_floating(job.dtype, row.data(), i);
        if (job.wire != job.dtype) {
          std::byte narrow[8];
          write_floating(job.wire, narrow, 0, static_cast<double>(vector[i]) * job.prescale);
          vector[i] = read_floating(job.wire, narrow, 0) / static_cast<long double>(job.prescale);
        }
        size[i] += std::abs(vector[i]);
      }
      vectors.push_back(vector);
    }
    const Wide rule = adasum_rule(vectors);
    const long double scale = static_cast<long double>(job.prescale) * job.postscale;
    for (size_t i = 0; i < job.counts[t]; ++i) {
      const long double expected = rule[i] * scale;
      const long double result = read_floating(job.dtype, results[t].data(), i);
      const long double error = 1.01L * unit(job.wire) * std::abs(expected) +
                                1e-12L * std::abs(scale) * (size[i] + std::abs(rule[i])) +
                                static_cast<long double>(smallest_normal(job.wire)) * unit(job.wire) * 2;
      ASSERT_LE(std::abs(result - expected), error)
          << to_string(job.dtype) << " ranks " << job.size() << " tensor " << t << " element " << i << " of "
          << job.counts[t] << ": expected " << expected << " got " << result;
    }
  }
}

Wide random_vector(size_t count, uint64_t seed, double size = 1.0) {
  Wide values(count);
  for (size_t i = 0; i < count; ++i) {
    values[i] = size * (static_cast<double>(mix(seed * 7919 + i) % 20001) - 9000) / 10000;
  }
  return values;
}

Job random_job(int ranks, DataType dtype, std::vector<size_t> counts, double size = 1.0) {
  Job job;
  job.dtype = job.wire = dtype;
  job.counts = std::move(counts);
  for (size_t t = 0; t < job.counts.size(); ++t) {
    job.inputs.emplace_back();
    for (int rank = 0; rank < ranks; ++rank) {
      job.inputs.back().push_back(random_vector(job.counts[t], t * 100 + static_cast<uint64_t>(rank), size));
    }
  }
  return job;
}

Job given(DataType dtype, std::vector<Wide> inputs) {
  Job job;
  job.dtype = job.wire = dtype;
  job.counts = {0};
  for (const Wide& input : inputs) job.counts[0] = std::max(job.counts[0], input.size());
  job.inputs = {std::move(inputs)};
  return job;
}

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
