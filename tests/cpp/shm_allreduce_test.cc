// Every dtype, operator, size, layout and absence through both allreduce algorithms, bit for bit against the naive
// result. Small chunks put many chunk and slice edges into small buckets.
#include <gtest/gtest.h>

#include <chrono>
#include <random>

#include "shm_case.h"
#include "shm_world.h"

namespace fusewire::testing {
namespace {

using std::chrono::microseconds;

#if defined(__SANITIZE_THREAD__)  // tens of times slower
constexpr int kSizes[] = {2, 3, 5};
#else
constexpr int kSizes[] = {1, 2, 3, 4, 5, 8};
#endif
constexpr int64_t kChunk = 1024;      // the smallest chunk there is
constexpr int64_t kOnceBytes = 1024;  // with that chunk, what goes all at once

ShmOptions small_chunks(int spin_us) {
  ShmOptions options;
  options.chunk_bytes = kChunk;
  options.spin = microseconds(spin_us);
  return options;
}

void run_both_ways(const std::vector<Case>& cases, const ShmOptions& options) {
  const auto expected = expect_all(cases);
  const auto body = [&](int rank, Backend& backend) { return run_cases(cases, expected, rank, backend); };
  EXPECT_EQ(run_threads(cases.front().size, options, body), "");
#if !defined(__SANITIZE_THREAD__)  // it does not follow a fork of a process with threads
  EXPECT_EQ(run_processes(cases.front().size, options, body), "");
#endif
}

// Element counts on both sides of every edge: nothing, one, a slice, a chunk, the switch between the algorithms.
std::vector<int64_t> edge_counts(DataType dtype, int size) {
  const auto width = static_cast<int64_t>(size_of(dtype));
  const int64_t chunk = kChunk / width;
  const int64_t once = kOnceBytes / width;
  const int64_t slice = (chunk + size - 1) / size;
  return {0,
          1,
          7,
          once - 1,
          once,
          once + 1,
          5 * chunk,
          6 * chunk - 1,
          5 * chunk + 1,
          5 * chunk + slice - 1,
          5 * chunk + slice + 1,
          7 * chunk + chunk / 2};
}

class ShmAllreduce : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ShmAllreduce, ::testing::ValuesIn(kSizes));

TEST_P(ShmAllreduce, EveryTypeAndOperatorAtEveryEdge) {
  for (int t = 0; t < kDataTypeCount; ++t) {
    const auto dtype = static_cast<DataType>(t);
    std::vector<Case> cases;
    for (int o = 0; o < kReduceOpCount; ++o) {
      const auto op = static_cast<ReduceOp>(o);
      if (!supports(dtype, op) || op == ReduceOp::kAdasum) continue;  // that has a test of its own
      for (const int64_t count : edge_counts(dtype, GetParam())) {
        Case c;
        c.size = GetParam();
        c.dtype = c.wire = dtype;
        c.op = op;
        c.shapes = {{count}};
        c.seed = static_cast<uint64_t>(cases.size() + 1);
        cases.push_back(c);
      }
    }
    run_both_ways(cases, small_chunks(0));
  }
}

TEST_P(ShmAllreduce, ScalesReachTheAccumulator) {
  std::vector<Case> cases;
  for (const DataType dtype : {DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16, DataType::kFloat64,
                               DataType::kInt64, DataType::kInt8, DataType::kComplex64}) {
    for (int o = 0; o < kReduceOpCount; ++o) {
      for (const auto& [pre, post] : {std::pair{0.25, 4.0}, std::pair{-0.5, 1.0}, std::pair{1.0, 1.0 / 3}}) {
        Case c;
        c.size = GetParam();
        c.dtype = c.wire = dtype;
        c.op = static_cast<ReduceOp>(o);
        if (!supports(dtype, c.op) || c.op == ReduceOp::kAdasum) continue;
        c.prescale = pre;
        c.postscale = post;
        c.shapes = {{100}, {1031}, {3, 5}};
        c.seed = static_cast<uint64_t>(cases.size() + 1);
        cases.push_back(c);
        c.shapes = {{5}};
        cases.push_back(c);
      }
    }
  }
  run_both_ways(cases, small_chunks(20));
}

// A negative prescale turns the order of values around, so Min of the scaled values is the scaled Max.
TEST(ShmAllreduceScale, NegativePrescaleOfMinIsTheMinOfScaledValues) {
  const float inputs[2][3] = {{1, -2, 3}, {4, -5, -6}};
  const float expected[3] = {-8, 4, -6};
  EXPECT_EQ(run_threads(2, {},
                        [&](int rank, Backend& backend) -> std::string {
                          float data[3];
                          std::memcpy(data, inputs[rank], sizeof(data));
                          Bucket bucket;
                          bucket.op = ReduceOp::kMin;
                          bucket.prescale = -2;
                          bucket.elements = 3;
                          const TensorView view = contiguous_view(data, DataType::kFloat32, {3});
                          bucket.segments = {{view, view}};
                          backend.run(bucket);
                          return std::memcmp(data, expected, sizeof(data)) == 0 ? "" : "wrong";
                        }),
            "");
}

TEST_P(ShmAllreduce, CompressionGivesTheSameBitsEverywhere) {
  std::vector<Case> cases;
  for (const auto& [dtype, wire] :
       {std::pair{DataType::kFloat32, DataType::kFloat16}, std::pair{DataType::kFloat32, DataType::kBFloat16},
        std::pair{DataType::kFloat64, DataType::kFloat16}, std::pair{DataType::kFloat64, DataType::kFloat32}}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin}) {
      for (const bool mixed : {false, true}) {
        Case c;
        c.size = GetParam();
        c.dtype = dtype;
        c.wire = wire;
        c.op = op;
        c.prescale = 0.5;
        c.postscale = 3.0;
        c.shapes = {{1}, {700}, {1031}, {40, 50}, {}, {0}, {2049}};
        c.mixed = mixed;
        c.seed = static_cast<uint64_t>(cases.size() + 1);
        cases.push_back(c);
      }
    }
  }
  run_both_ways(cases, small_chunks(0));
}

// Tensors of every size side by side, each rank with its own layouts, aliasing, absences and unwanted outputs.
TEST_P(ShmAllreduce, MixedBucketsOfBothAlgorithmsBackToBack) {
  std::mt19937 random(7);
  std::vector<Case> cases;
  const std::vector<Dims> pool = {{},    {0},   {1},        {8},    {3, 0, 2}, {17},     {16, 16}, {255},
                                  {256}, {257}, {7, 11, 5}, {1000}, {33, 31},  {2, 512}, {4000},   {1, 1, 9}};
  const DataType types[] = {DataType::kFloat32, DataType::kBFloat16, DataType::kInt64, DataType::kUInt8,
                            DataType::kComplex128};
  for (int i = 0; i < 60; ++i) {
    Case c;
    c.size = GetParam();
    c.dtype = c.wire = types[i % 5];
    c.op = i % 3 == 0 ? ReduceOp::kAverage : ReduceOp::kSum;
    c.kind = i % 7 == 6 ? OpKind::kBroadcast : OpKind::kAllreduce;
    c.root = i % c.size;
    c.mixed = true;
    c.seed = static_cast<uint64_t>(i + 1);
    const size_t tensors = i % 4 == 0 ? 1 : 1 + random() % 25;
    for (size_t t = 0; t < tensors; ++t) c.shapes.push_back(pool[random() % pool.size()]);
    cases.push_back(c);
  }
  run_both_ways(cases, small_chunks(0));
  run_both_ways(cases, small_chunks(20));
  run_both_ways(cases, {});
}

TEST_P(ShmAllreduce, ThousandsOfTinyTensors) {
  Case c;
  c.size = GetParam();
  c.shapes.assign(10'000, {8});
  Case mixed = c;
  mixed.mixed = true;
  mixed.seed = 2;
  run_both_ways({c, mixed}, {});
}

// With the chunks of production, over several of each table's rows.
TEST_P(ShmAllreduce, LargeBuckets) {
  std::vector<Case> cases;
  for (const int64_t count : {20'000, 70'001, 300'007, 1'200'011}) {
    Case c;
    c.size = GetParam();
    c.op = ReduceOp::kAverage;
    c.shapes = {{count / 3}, {100}, {count - count / 3}};
    c.seed = static_cast<uint64_t>(count);
    cases.push_back(c);
  }
  ShmOptions crowded;
  crowded.spin = microseconds(0);
  run_both_ways(cases, crowded);
  run_both_ways(cases, {});
}

#if !defined(__SANITIZE_THREAD__)  // which does not see such stores, so they are compiled out for it
// Large enough that outputs which are not inputs are written around the caches.
TEST(ShmAllreduceStreaming, OutOfPlaceAndBroadcast) {
  std::vector<Case> cases;
  for (uint64_t seed = 1; seed <= 4; ++seed) {
    Case c;
    c.kind = seed > 2 ? OpKind::kBroadcast : OpKind::kAllreduce;
    c.root = static_cast<int>(seed % 2);
    c.shapes.assign(9, {250'001});  // odd, so that tensors start anywhere in a line
    c.out_of_place = true;
    c.seed = seed;
    cases.push_back(c);
  }
  run_both_ways(cases, {});
}
#endif

// The bits of an element do not depend on what it was fused with, nor on the algorithm or the chunk.
TEST(ShmAllreduceDeterminism, FusionAndChunksDoNotShow) {
  constexpr int kRanks = 3;
  const int64_t counts[] = {5, 300, 3000, 40'000};
  std::vector<std::vector<std::byte>> alone(4);
  for (const int64_t chunk : {0, 1024, 5000, 1 << 20}) {
    ShmOptions options;
    options.chunk_bytes = chunk;
    for (const bool fused : {false, true}) {
      const auto body = [&](int rank, Backend& backend) -> std::string {
        std::vector<std::vector<std::byte>> data;
        std::vector<Bucket> buckets(fused ? 1 : 4);
        for (size_t t = 0; t < 4; ++t) {
          data.push_back(make_values(DataType::kFloat32, counts[t], t * 100 + static_cast<uint64_t>(rank) * 1'000'003));
          const TensorView view = contiguous_view(data.back().data(), DataType::kFloat32, {counts[t]});
          Bucket& bucket = buckets[fused ? 0 : t];
          bucket.op = ReduceOp::kAverage;
          bucket.prescale = 0.3;
          bucket.segments.push_back({view, view});
          bucket.elements += counts[t];
        }
        for (const Bucket& bucket : buckets) backend.run(bucket);
        if (rank == 0 && alone[0].empty()) alone = data;
        return rank != 0 || data == alone ? "" : "other bits with chunk " + std::to_string(chunk);
      };
      EXPECT_EQ(run_threads(kRanks, options, body), "");
    }
  }
}

// Ranks set up differently still cut buckets alike: rank 0's settings count.
TEST(ShmAllreduceGeometry, RankZeroDecides) {
  HeapRegion region(shm_region_bytes(3));
  Case c;
  c.size = 3;
  c.shapes = {{9000}};
  const std::vector<std::vector<std::byte>> expected = {expect(c, 0)};
  std::vector<std::string> faults(3);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      ShmOptions options{rank, 3, 1024 + 3000 * rank, microseconds(rank * 10), {}};
      const auto backend = make_shm_backend(region.data(), options);
      faults[static_cast<size_t>(rank)] = run_case(c, expected, rank, *backend);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(join_faults(faults), "");
}

// Random pauses make every rank in turn the early and the late one; each slot is then wanted while somebody reads it.
TEST(ShmAllreduceSlots, RewrittenOnlyWhenAllHaveRead) {
  for (const int size : {2, 3, 5}) {
    std::vector<Case> cases;
    for (int i = 0; i < 150; ++i) {
      Case c;
      c.size = size;
      c.seed = static_cast<uint64_t>(i + 1);
      c.kind = i % 3 == 2 ? OpKind::kBroadcast : OpKind::kAllreduce;
      c.root = i % size;
      c.shapes = {{i % 2 == 0 ? 50 : 5000}};
      cases.push_back(c);
    }
    const auto expected = expect_all(cases);
    for (const int spin : {0, 20}) {
      EXPECT_EQ(run_threads(size, small_chunks(spin),
                            [&](int rank, Backend& backend) -> std::string {
                              std::mt19937 random(static_cast<unsigned>(rank));
                              for (size_t i = 0; i < cases.size(); ++i) {
                                if (random() % 3 == 0) std::this_thread::sleep_for(microseconds(random() % 200));
                                std::string fault = run_case(cases[i], expected[i], rank, backend);
                                if (!fault.empty()) return fault;
                              }
                              return "";
                            }),
                "");
    }
  }
}

}  // namespace
}  // namespace fusewire::testing
