// Dot products and linear combinations per tensor of a fused buffer, on the stand-in, against long double.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kernels/device_plan.h"
#include "kernels_data.h"
#include "simt/stand_in.h"

namespace fusewire::testing {
namespace {

struct Range {
  uint64_t begin;
  uint64_t count;
};

class DeviceAdasum : public ::testing::TestWithParam<DataType> {
 protected:
  // Tensors of all sizes one after the other: several in a warp's block, one over several blocks, empty ones.
  std::vector<Range> ranges(bool align) {
    const auto tile = static_cast<int64_t>(16384 / size_of(GetParam()));
    std::vector<Range> all;
    uint64_t at = 0;
    for (const int64_t count : {int64_t{1}, int64_t{7}, int64_t{0}, tile - 1, tile, tile + 1, int64_t{33}, 3 * tile + 5,
                                17 * tile + 3, int64_t{2}, int64_t{64}, int64_t{64}, 9 * tile, int64_t{100}}) {
      if (align) at = (at + 7) / 8 * 8;
      all.push_back({at, static_cast<uint64_t>(count)});
      at += static_cast<uint64_t>(count);
    }
    return all;
  }

  void prepare(int source_count, bool align, Flavour flavour) {
    spans_ = ranges(align);
    const size_t elements = spans_.back().begin + spans_.back().count;
    sources_.clear();
    for (int s = 0; s < source_count; ++s) {
      sources_.push_back(std::make_unique<Buffer>(elements * size_of(GetParam()), align ? 0 : size_of(GetParam())));
      random_.fill(GetParam(), flavour, sources_.back()->data(), elements);
    }
    plan_ = std::make_unique<SpanPlan>(GetParam());
    for (const Range& range : spans_) plan_->add(range.begin, range.count);
    table_ = std::make_unique<Buffer>(plan_->table_bytes(), 0);
    plan_->write(table_->data());
  }

  double at(size_t source, uint64_t index) const { return read_floating(GetParam(), sources_[source]->data(), index); }
  size_t pairs() const { return sources_.size() * (sources_.size() + 1) / 2; }

  std::vector<double> dots(std::vector<uint32_t>& arrivals) {
    std::vector<double> result(spans_.size() * pairs(), -1.0);
    std::vector<double> partials(plan_->slots() * pairs(), NAN);
    DeviceDotArgs args = plan_->dot_args(table_->data());
    for (size_t s = 0; s < sources_.size(); ++s) args.sources[s] = sources_[s]->data();
    args.source_count = static_cast<int>(sources_.size());
    args.dots = result.data();
    args.partials = partials.data();
    args.arrivals = arrivals.data();
    simt::seed(random_.bits());
    const uint64_t before = simt::launches();
    EXPECT_EQ(kCudaKernels.dot(args), 0);
    EXPECT_EQ(simt::launches() - before, 1u);
    return result;
  }

  Random random_{99};
  std::vector<Range> spans_;
  std::vector<std::unique_ptr<Buffer>> sources_;
  std::unique_ptr<SpanPlan> plan_;
  std::unique_ptr<Buffer> table_;
};

TEST_P(DeviceAdasum, AllPairsOfAllTensorsInOneLaunch) {
  for (const int source_count : {2, 3, 4}) {
    for (const bool align : {true, false}) {
      prepare(source_count, align, Flavour::kOrdinary);
      std::vector<uint32_t> arrivals(spans_.size());
      const std::vector<double> first = dots(arrivals);
      for (size_t span = 0; span < spans_.size(); ++span) {
        const Range& range = spans_[span];
        size_t pair = span * pairs();
        for (size_t i = 0; i < sources_.size(); ++i) {
          for (size_t j = i; j < sources_.size(); ++j, ++pair) {
            if (range.count == 0) {
              EXPECT_EQ(first[pair], -1.0) << "an empty tensor has no dot product";
              continue;
            }
            long double sum = 0;
            long double size = 0;
            for (uint64_t e = range.begin; e < range.begin + range.count; ++e) {
              const long double product = static_cast<long double>(at(i, e)) * at(j, e);
              sum += product;
              size += std::fabs(product);
            }
            EXPECT_NEAR(first[pair], static_cast<double>(sum), static_cast<double>(size) * 1e-14)
                << "tensor " << span << " of " << range.count << ", " << i << " * " << j;
          }
        }
      }
      // Whatever the order of blocks and threads, the bits are the same; the counters serve again as they are.
      for (int again = 0; again < 3; ++again) {
        const std::vector<double> other = dots(arrivals);
        ASSERT_EQ(std::memcmp(first.data(), other.data(), first.size() * sizeof(double)), 0);
      }
      EXPECT_EQ(arrivals, std::vector<uint32_t>(spans_.size()));
    }
  }
}

TEST_P(DeviceAdasum, InfinityInOneTensorStaysThere) {
  prepare(2, true, Flavour::kOrdinary);
  write_floating(GetParam(), sources_[0]->data(), spans_[6].begin + 3, INFINITY);
  std::vector<uint32_t> arrivals(spans_.size());
  const std::vector<double> result = dots(arrivals);
  for (size_t span = 0; span < spans_.size(); ++span) {
    EXPECT_EQ(std::isfinite(result[span * 3]), span != 6) << span;
    EXPECT_TRUE(std::isfinite(result[span * 3 + 2])) << span;
  }
}

TEST_P(DeviceAdasum, Combination) {
  for (const int source_count : {1, 2, 3, 5}) {
    for (const bool align : {true, false}) {
      prepare(source_count, align, Flavour::kAnyBits);
      std::vector<double> coefficients(spans_.size() * static_cast<size_t>(source_count));
      for (double& c : coefficients) c = random_.uniform();
      const double factor = align ? 1.0 : 0.3;
      Buffer expected(*sources_[0]);
      Buffer result(*sources_[0]);
      for (size_t span = 0; span < spans_.size(); ++span) {
        for (uint64_t e = spans_[span].begin; e < spans_[span].begin + spans_[span].count; ++e) {
          double sum = 0;
          for (size_t s = 0; s < sources_.size(); ++s) {
            const double x = at(s, e) * coefficients[span * sources_.size() + s];
            sum = s == 0 ? x : sum + x;
          }
          write_floating(GetParam(), expected.data(), e, sum * factor);
        }
      }
      DeviceCombineArgs args = plan_->combine_args(table_->data());
      for (size_t s = 0; s < sources_.size(); ++s) args.sources[s] = s == 0 ? result.data() : sources_[s]->data();
      args.source_count = source_count;
      args.coefficients = coefficients.data();
      args.destination = result.data();  // in place
      args.factor = factor;
      ASSERT_EQ(kCudaKernels.combine(args), 0);
      const size_t n = result.size() / size_of(GetParam());
      ASSERT_EQ(first_difference(GetParam(), expected.data(), result.data(), n), -1);
      ASSERT_TRUE(result.guards_intact());
    }
  }
}

// One block publishes the last partial sums of several tensors: the grid's order decides which does.
TEST_P(DeviceAdasum, OneBlockFinishesSeveralTensors) {
  const auto tile = 16384 / size_of(GetParam());
  spans_ = {{0, 12 * tile}, {12 * tile, 10 * tile}};  // blocks 0-1 and 1-2
  sources_.clear();
  for (int s = 0; s < 4; ++s) {
    sources_.push_back(std::make_unique<Buffer>(22 * tile * size_of(GetParam()), 0));
    for (size_t e = 0; e < 22 * tile; ++e)
      write_floating(GetParam(), sources_.back()->data(), e, e < 12 * tile ? 1 : 2);
  }
  plan_ = std::make_unique<SpanPlan>(GetParam());
  for (const Range& range : spans_) plan_->add(range.begin, range.count);
  table_ = std::make_unique<Buffer>(plan_->table_bytes(), 0);
  plan_->write(table_->data());
  std::vector<uint32_t> arrivals(2);
  for (int round = 0; round < 12; ++round) {
    const std::vector<double> result = dots(arrivals);
    for (size_t pair = 0; pair < 20; ++pair) {
      ASSERT_EQ(result[pair], static_cast<double>(pair < 10 ? 12 * tile : 4 * 10 * tile)) << pair;
    }
  }
}

// Equal vectors stay what they are, orthogonal ones are added, a zero vector changes nothing (arXiv 2006.02924).
TEST_P(DeviceAdasum, PairsOfKnownResult) {
  prepare(2, true, Flavour::kOrdinary);
  const auto set = [&](size_t source, uint64_t e, double x) {
    write_floating(GetParam(), sources_[source]->data(), e, x);
  };
  std::vector<double> expected(sources_[0]->size() / size_of(GetParam()), NAN);
  for (size_t span = 0; span < spans_.size(); ++span) {
    for (uint64_t e = spans_[span].begin; e < spans_[span].begin + spans_[span].count; ++e) {
      const double a = at(0, e);
      const bool even = (e - spans_[span].begin) % 2 == 0;
      if (span % 3 == 0) set(1, e, a);
      if (span % 3 == 1) set(even ? 1 : 0, e, 0.0);
      if (span % 3 == 2) set(1, e, 0.0);
      expected[e] = span % 3 == 1 ? at(0, e) + at(1, e) : at(0, e);
    }
  }
  std::vector<uint32_t> arrivals(spans_.size());
  const std::vector<double> products = dots(arrivals);
  Buffer result(*sources_[0]);
  DeviceCombineArgs args = plan_->combine_args(table_->data());
  args.sources[0] = sources_[0]->data();
  args.sources[1] = sources_[1]->data();
  args.source_count = 2;
  args.dots = products.data();
  args.destination = result.data();
  ASSERT_EQ(kCudaKernels.combine(args), 0);
  for (const Range& range : spans_) {
    for (uint64_t e = range.begin; e < range.begin + range.count; ++e) {
      ASSERT_EQ(read_floating(GetParam(), result.data(), e), expected[e]) << "tensor of " << range.count;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, DeviceAdasum, ::testing::ValuesIn(kFloatingTypes),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST(DeviceAdasumArgs, WhatNoKernelServesIsAnError) {
  DeviceDotArgs dot;
  dot.tiles = 1;
  dot.source_count = 5;
  EXPECT_NE(kCudaKernels.dot(dot), 0);
  dot.source_count = 2;
  dot.dtype = DataType::kInt32;
  EXPECT_NE(kCudaKernels.dot(dot), 0);
  DeviceCombineArgs combine;
  combine.tiles = 1;
  combine.source_count = 2;  // neither coefficients nor dot products
  EXPECT_NE(kCudaKernels.combine(combine), 0);
}

}  // namespace
}  // namespace fusewire::testing
