// Every kind of collective over NCCL, of all types, operators and layouts, with work done in any legal order, against
// the references of shared memory: bit for bit, but for sums of floats.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/error.h"
#include "nccl_world.h"
#include "shm_parts_case.h"

namespace fusewire::testing {
namespace {

const Case& base_of(const Case& c) { return c; }
const Case& base_of(const PartsCase& c) { return c.base; }
void loosen(Case& c) { c.nearly = true; }
void loosen(PartsCase& c) { c.base.nearly = true; }

using Prepare = std::function<void(int rank, NcclDouble&)>;

// A few cases share a GPU and a communicator.
template <class AnyCase>
void run_all(std::vector<AnyCase> cases, const NcclTuning& tuning = kSmallTuning, const Prepare& prepare = {},
             uint64_t seeds = 1) {
  for (AnyCase& c : cases) loosen(c);
  const auto expected = expect_all(cases);
  const int size = base_of(cases.front()).size;
  for (uint64_t seed = 0; seed < seeds; ++seed) {
    for (size_t first = 0; first < cases.size(); first += 8) {
      const std::string faults = with_nccl(size, seed * 1000 + first, [&](int rank, NcclRank& self, Backend& cpu) {
        if (prepare) prepare(rank, self.nccl);
        self.start(cpu, {.rank = rank, .size = size}, tuning);
        for (size_t i = first; i < std::min(first + 8, cases.size()); ++i) {
          std::string fault;
          if constexpr (std::is_same_v<AnyCase, Case>) {
            fault = run_case(cases[i], expected[i], rank, *self.to_the_end);
          } else {
            fault = run_case(cases[i], expected[i][static_cast<size_t>(rank)], rank, *self.to_the_end);
          }
          if (!fault.empty()) return fault;
        }
        return std::string();
      });
      ASSERT_EQ(faults, "") << base_of(cases[first]).describe() << " and later, seed " << seed;
    }
  }
}

class GpuNccl : public ::testing::TestWithParam<int> {};
#if defined(__SANITIZE_THREAD__)  // tens of times slower
INSTANTIATE_TEST_SUITE_P(Ranks, GpuNccl, ::testing::Values(2, 3));
#else
INSTANTIATE_TEST_SUITE_P(Ranks, GpuNccl, ::testing::Values(1, 2, 3, 5, 8));
#endif

// Fused; one that is large enough to stay where it is; several rows.
const std::vector<std::vector<Dims>> kShapes = {
    {{3}, {7, 5}, {0}, {}, {9}, {33}}, {{600}}, {{500}, {3}, {40, 21}, {1}, {1200}}};

TEST_P(GpuNccl, AllreduceOfEveryTypeAndOperator) {
  std::vector<Case> cases;
  for (int t = 0; t < kDataTypeCount; ++t) {
    for (int o = 0; o < kReduceOpCount; ++o) {
      Case c;
      c.size = GetParam();
      c.dtype = c.wire = static_cast<DataType>(t);
      c.op = static_cast<ReduceOp>(o);
      if (!supports(c.dtype, c.op) || c.op == ReduceOp::kAdasum) continue;
      c.shapes = kShapes[static_cast<size_t>(t + o) % 3];
      c.seed = static_cast<uint64_t>(t * 10 + o);
      c.mixed = o % 2 == 0;
      c.out_of_place = t % 2 == 0;
      cases.push_back(c);
    }
  }
  run_all(cases);
}

TEST_P(GpuNccl, ScalesOfEveryTypeAndNarrowWires) {
  std::vector<Case> cases;
  for (const auto& [dtype, wire] :
       {std::pair{DataType::kFloat32, DataType::kFloat32}, std::pair{DataType::kFloat32, DataType::kFloat16},
        std::pair{DataType::kFloat64, DataType::kBFloat16}, std::pair{DataType::kFloat16, DataType::kFloat16},
        std::pair{DataType::kInt8, DataType::kInt8}, std::pair{DataType::kInt64, DataType::kInt64},
        std::pair{DataType::kComplex64, DataType::kComplex64}}) {
    for (int o = 0; o < kReduceOpCount; ++o) {
      for (const auto& [pre, post] : {std::pair{0.25, 4.0}, std::pair{-0.5, 1.0}, std::pair{4.0, 1.0 / 3}}) {
        Case c;
        c.size = GetParam();
        c.dtype = dtype;
        c.wire = wire;
        c.op = static_cast<ReduceOp>(o);
        if (!supports(dtype, c.op) || c.op == ReduceOp::kAdasum) continue;
        c.prescale = pre;
        c.postscale = post;
        c.shapes = kShapes[cases.size() % 3];
        c.mixed = cases.size() % 2 == 0;
        c.out_of_place = cases.size() % 4 == 1;
        c.seed = cases.size();
        cases.push_back(c);
      }
    }
  }
  run_all(cases);
}

TEST_P(GpuNccl, BroadcastFromEveryRoot) {
  std::vector<Case> cases;
  for (int root = 0; root < GetParam(); ++root) {
    for (const bool mixed : {false, true}) {
      for (const auto& shapes : kShapes) {
        Case c;
        c.size = GetParam();
        c.kind = OpKind::kBroadcast;
        c.dtype = c.wire = root % 2 == 0 ? DataType::kInt16 : DataType::kComplex128;
        c.root = root;
        c.shapes = shapes;
        c.mixed = mixed;
        c.out_of_place = root % 2 == 1;
        c.seed = static_cast<uint64_t>(root);
        cases.push_back(c);
      }
    }
  }
  run_all(cases);
}

std::vector<PartsCase> parts_cases(int size, OpKind kind) {
  std::vector<PartsCase> cases;
  for (int t = 0; t < kDataTypeCount; ++t) {
    for (const auto& widths : {std::vector<int64_t>{1, 3, 40}, std::vector<int64_t>{60}}) {
      const uint64_t seed = static_cast<uint64_t>(t) * 2 + widths.size() % 2;
      PartsCase c = PartsCase::make(kind, static_cast<DataType>(t), size, widths, 7, seed);
      if (c.base.dtype == DataType::kBool) c.base.op = ReduceOp::kMax;
      c.base.mixed = t % 2 == 0;
      c.zero_ranks = seed % 5;
      cases.push_back(c.finish());
      // Members that have equally much.
      c.rows.clear();
      c.base.shapes.clear();
      c.base.mixed = t % 2 == 1;
      c.zero_ranks = 0;
      c.finish();
      for (size_t i = 0; i < widths.size(); ++i) {
        std::fill(c.rows[i].begin(), c.rows[i].end(), 3);
        c.base.shapes[i] = {3 * static_cast<int64_t>(c.rows[i].size()), widths[i]};
      }
      cases.push_back(c);
    }
  }
  cases.push_back(PartsCase::make(kind, DataType::kInt8, size, {}, 1, 3).finish());
  cases.push_back(PartsCase::make(kind, DataType::kInt8, size, {5000}, 0, 3).finish());
  return cases;
}

TEST_P(GpuNccl, AllgatherOfEveryType) { run_all(parts_cases(GetParam(), OpKind::kAllgather)); }
TEST_P(GpuNccl, AlltoallOfEveryType) { run_all(parts_cases(GetParam(), OpKind::kAlltoall)); }
TEST_P(GpuNccl, ReduceScatterOfEveryType) { run_all(parts_cases(GetParam(), OpKind::kReduceScatter)); }

TEST_P(GpuNccl, ReduceScatterOfEveryOperatorScaled) {
  std::vector<PartsCase> cases;
  for (int o = 0; o < kReduceOpCount; ++o) {
    for (const DataType dtype : {DataType::kFloat32, DataType::kInt32, DataType::kInt64, DataType::kBFloat16}) {
      PartsCase c = PartsCase::make(OpKind::kReduceScatter, dtype, GetParam(), {17, 2}, 9, cases.size());
      c.base.op = static_cast<ReduceOp>(o);
      if (c.base.op == ReduceOp::kAdasum) continue;
      c.base.prescale = -0.5;
      c.base.postscale = 3;
      cases.push_back(c.finish());
    }
  }
  run_all(cases);
}

// Work in other orders, calls that take NCCL a while, no windows: none of it shows.
TEST_P(GpuNccl, OrderSlownessAndWindowsDoNotShow) {
  std::vector<Case> cases;
  for (uint64_t i = 0; i < 16; ++i) {
    Case c;
    c.size = GetParam();
    c.seed = i;
    c.mixed = i % 3 == 0;
    c.op = i % 2 == 0 ? ReduceOp::kAverage : ReduceOp::kMax;
    c.kind = i % 5 == 4 ? OpKind::kBroadcast : OpKind::kAllreduce;
    c.shapes.assign(1 + i % 4, {static_cast<int64_t>(mix(i) % 700)});
    cases.push_back(c);
  }
  run_all(cases, kSmallTuning, {}, 3);
  run_all(cases, kSmallTuning, [](int rank, NcclDouble& nccl) { nccl.slow_polls = 2 + rank; });
  run_all(cases, kSmallTuning, [](int, NcclDouble& nccl) { nccl.windows = false; });
  run_all(cases, kSmallTuning, [](int, NcclDouble& nccl) { nccl.null_windows = true; });
  run_all(cases, kSmallTuning, [](int rank, NcclDouble& nccl) { nccl.windows = rank != 0; });
}

// ---- numbers that other planes promise, too ----

template <class Value>
std::vector<Value> reduced(int size, ReduceOp op, DataType dtype, const std::function<Value(int)>& value_of,
                           int64_t count = 3) {
  std::vector<Value> result;
  const std::string faults = with_nccl(size, 1, [&](int rank, NcclRank& self, Backend& cpu) -> std::string {
    self.start(cpu, {.rank = rank, .size = size});
    std::vector<Value> values(static_cast<size_t>(count), value_of(rank));
    Bucket bucket;
    bucket.op = op;
    bucket.dtype = bucket.wire = dtype;
    bucket.elements = count;
    const TensorView view = contiguous_view(values.data(), dtype, {count});
    bucket.segments = {{view, view}};
    self.to_the_end->run(bucket);
    if (rank == 0) result = values;
    return "";
  });
  EXPECT_EQ(faults, "");
  return result;
}

TEST(GpuNcclNumbers, TheMeanOfTheLargestHalvesIsFinite) {
  for (const int size : {2, 3, 8}) {
    for (const int64_t count : {3, 4000}) {  // packed, and in place
      const auto mean =
          reduced<uint16_t>(size, ReduceOp::kAverage, DataType::kFloat16, [](int) { return uint16_t{0x7bff}; }, count);
      EXPECT_EQ(mean.back(), 0x7bff) << size;  // 65504
    }
  }
}

TEST(GpuNcclNumbers, TheMeanOfTheLargestFloatsIsFinite) {
  constexpr float kLargest = std::numeric_limits<float>::max();
  EXPECT_EQ(reduced<float>(4, ReduceOp::kAverage, DataType::kFloat32, [](int) { return kLargest; })[0], kLargest);
}

TEST(GpuNcclNumbers, NaNPropagatesInMinAndMax) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    const auto value = [&](int rank) { return rank == 1 ? nan : static_cast<float>(rank); };
    EXPECT_TRUE(std::isnan(reduced<float>(3, op, DataType::kFloat32, value)[0]));
  }
}

TEST(GpuNcclNumbers, TheMeanOfSmallIntegersDoesNotWrapAround) {
  EXPECT_EQ(reduced<int8_t>(3, ReduceOp::kAverage, DataType::kInt8, [](int) { return int8_t{100}; })[0], 100);
  EXPECT_EQ(reduced<int64_t>(3, ReduceOp::kAverage, DataType::kInt64, [](int rank) { return -int64_t{rank}; })[0], -1);
}

TEST(GpuNcclNumbers, MoreContributionsThanOneLaunchTakesAreReducedInTurn) {
  Bucket bucket;
  bucket.dtype = bucket.wire = DataType::kInt16;
  bucket.op = ReduceOp::kAverage;
  EXPECT_FALSE(plan_numbers(bucket, 32).native);
  try {
    plan_numbers(bucket, 33);
    ADD_FAILURE() << "no error was raised";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidType);
    EXPECT_NE(std::string(error.what()).find("int16"), std::string::npos) << error.what();
  }
  bucket.op = ReduceOp::kMax;
  EXPECT_FALSE(plan_numbers(bucket, 70).native);
  GpuOfRank gpu(1);
  std::vector<std::vector<float>> rows;
  std::vector<const void*> sources;
  for (int i = 0; i < 70; ++i) rows.push_back(std::vector<float>(5, static_cast<float>((i * 37) % 70)));
  for (const auto& row : rows) sources.push_back(row.data());
  gpu_reduce(*gpu.device, sources, rows[0].data(), 5, DataType::kFloat32, {ReduceOp::kMax, {2.0, 1}});
  gpu.device->mark()->synchronize();
  EXPECT_EQ(rows[0], std::vector<float>(5, 138.0F));
  EXPECT_EQ(gpu.cuda->launched("reduce"), 3u);
  EXPECT_EQ(gpu.mistakes(), "");
}

// ---- what is launched ----

struct Launches {
  size_t pack, unpack, reduce, nccl;
  bool operator==(const Launches&) const = default;
};

Launches launches_of(const Case& c, const NcclTuning& tuning = {}) {
  Launches launches{};
  const auto expected = expect_all(std::vector{c});
  EXPECT_EQ(with_nccl(c.size, 1,
                      [&](int rank, NcclRank& self, Backend& cpu) {
                        self.start(cpu, {.rank = rank, .size = c.size}, tuning);
                        std::string fault = run_case(c, expected[0], rank, *self.to_the_end);
                        const CudaDouble& cuda = *self.gpu.cuda;
                        if (rank == 1) {
                          launches = {cuda.launched("pack"), cuda.launched("unpack"), cuda.launched("reduce"),
                                      cuda.launched("nccl")};
                        }
                        return fault;
                      }),
            "");
  return launches;
}

Case launch_case(ReduceOp op, std::vector<Dims> shapes) {
  Case c;
  c.op = op;
  c.shapes = std::move(shapes);
  c.nearly = true;
  return c;
}

TEST(GpuNcclLaunches, AFusedBucketIsThree) {
  EXPECT_EQ(launches_of(launch_case(ReduceOp::kAverage, std::vector<Dims>(60, {50}))), (Launches{1, 1, 0, 1}));
}

TEST(GpuNcclLaunches, ALargeSumStaysWhereItIs) {
  const NcclTuning tuning{.buffer_bytes = 1 << 20, .direct_bytes = 1024};
  EXPECT_EQ(launches_of(launch_case(ReduceOp::kSum, {{4000}}), tuning), (Launches{0, 0, 0, 1}));
}

TEST(GpuNcclLaunches, ALargeMeanIsScaledWhereItIs) {
  const NcclTuning tuning{.buffer_bytes = 1 << 20, .direct_bytes = 1024};
  EXPECT_EQ(launches_of(launch_case(ReduceOp::kAverage, {{4000}}), tuning), (Launches{0, 0, 1, 1}));
}

TEST(GpuNcclLaunches, WhatNcclCannotReduceIsOneMore) {
  EXPECT_EQ(launches_of(launch_case(ReduceOp::kMax, {{40}, {50}})), (Launches{1, 1, 1, 1}));
}

}  // namespace
}  // namespace fusewire::testing
