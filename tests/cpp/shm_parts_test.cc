// Allgather, alltoall and reduce-scatter: uneven parts of fused tensors of every dtype and layout, bit for bit against
// concatenation and against what the allreduce gives.
#include <gtest/gtest.h>

#include <random>

#include "common/error.h"
#include "shm_parts_case.h"
#include "shm_world.h"

namespace fusewire::testing {
namespace {

using std::chrono::microseconds;

constexpr OpKind kKinds[] = {OpKind::kAllgather, OpKind::kAlltoall, OpKind::kReduceScatter};

// Through slots, and by reading each other's memory.
constexpr int64_t kNeverDirect = int64_t{1} << 40;
constexpr int64_t kDirect[] = {kNeverDirect, 1};

ShmOptions small_chunks(int spin_us, int64_t direct_bytes = kNeverDirect) {
  ShmOptions options;
  options.chunk_bytes = 1024;
  options.direct_bytes = direct_bytes;
  options.spin = microseconds(spin_us);
  return options;
}

void run_all_ways(const std::vector<PartsCase>& cases, ShmOptions options) {
  const int size = cases.front().base.size;
  const Expected expected = expect_all(cases);
  const auto body = [&](int rank, Backend& backend) { return run_cases(cases, expected, rank, backend); };
  for (const int64_t direct_bytes : kDirect) {
    options.direct_bytes = direct_bytes;
    EXPECT_EQ(run_threads(size, options, body), "");
#if !defined(__SANITIZE_THREAD__)  // it does not follow a fork of a process with threads
    EXPECT_EQ(run_processes(size, options, body), "");
#endif
  }
}

class ShmParts : public ::testing::TestWithParam<int> {};
#if defined(__SANITIZE_THREAD__)
INSTANTIATE_TEST_SUITE_P(Ranks, ShmParts, ::testing::Values(2, 3, 5));
#else
INSTANTIATE_TEST_SUITE_P(Ranks, ShmParts, ::testing::Values(1, 2, 3, 4, 5, 8));
#endif

TEST_P(ShmParts, EveryTypeInEveryLayout) {
  for (const OpKind kind : kKinds) {
    std::vector<PartsCase> cases;
    for (int t = 0; t < kDataTypeCount; ++t) {
      for (const bool mixed : {false, true}) {
        PartsCase c = PartsCase::make(kind, static_cast<DataType>(t), GetParam(), {1, 3, 40, 700, 9}, 7,
                                      static_cast<uint64_t>(t) * 2 + mixed);
        if (c.base.dtype == DataType::kBool) c.base.op = ReduceOp::kMax;
        c.base.mixed = mixed;
        cases.push_back(c.finish());
      }
    }
    run_all_ways(cases, small_chunks(GetParam() > 2 ? 0 : 20));
  }
}

TEST_P(ShmParts, RanksWithoutRowsAndEmptyBuckets) {
  std::vector<PartsCase> cases;
  for (uint64_t seed = 0; seed < 12; ++seed) {
    for (const OpKind kind : kKinds) {
      PartsCase c = PartsCase::make(kind, DataType::kFloat32, GetParam(), {5, 300, 1}, seed % 4 == 3 ? 0 : 6, seed);
      c.zero_ranks = seed < 4 ? uint64_t{1} << seed : seed * 37;
      cases.push_back(c.finish());
      cases.push_back(PartsCase::make(kind, DataType::kInt8, GetParam(), {}, 1, seed).finish());
    }
  }
  run_all_ways(cases, small_chunks(0));
}

// One chunk, several, and those that do not fit the cut by a little.
TEST_P(ShmParts, RowsOnBothSidesOfAChunk) {
  std::vector<PartsCase> cases;
  for (const OpKind kind : kKinds) {
    for (const int64_t width : {255, 256, 257, 1024, 5000}) {
      cases.push_back(PartsCase::make(kind, DataType::kFloat32, GetParam(), {width}, 3, 7).finish());
      cases.push_back(PartsCase::make(kind, DataType::kFloat16, GetParam(), {7, width, 1, width}, 2, 9).finish());
    }
  }
  run_all_ways(cases, small_chunks(20));
}

TEST_P(ShmParts, ManySmallTensorsAtDefaultChunks) {
  std::vector<PartsCase> cases;
  for (const OpKind kind : kKinds) {
    cases.push_back(
        PartsCase::make(kind, DataType::kFloat32, GetParam(), std::vector<int64_t>(1000, 11), 4, 3).finish());
    cases.push_back(PartsCase::make(kind, DataType::kUInt8, GetParam(), {1 << 18, 5}, 9, 4).finish());
  }
  ShmOptions options;
  options.spin = microseconds(0);
  run_all_ways(cases, options);
}

TEST_P(ShmParts, ReduceScatterScalesAsTheAllreduceDoes) {
  std::vector<PartsCase> cases;
  for (const DataType dtype : {DataType::kFloat32, DataType::kBFloat16, DataType::kFloat64, DataType::kInt32,
                               DataType::kInt8, DataType::kComplex64}) {
    for (int o = 0; o < kReduceOpCount; ++o) {
      const auto op = static_cast<ReduceOp>(o);
      if (!supports(dtype, op) || op == ReduceOp::kAdasum) continue;
      for (const auto& [pre, post] : {std::pair{1.0, 1.0}, std::pair{0.25, 4.0}, std::pair{-0.5, 1.0 / 3}}) {
        PartsCase c = PartsCase::make(OpKind::kReduceScatter, dtype, GetParam(), {3, 500, 17}, 3, 5);
        c.base.op = op;
        c.base.prescale = pre;
        c.base.postscale = post;
        c.base.mixed = o % 2 == 0;
        cases.push_back(c.finish());
      }
    }
  }
  for (const auto& [dtype, wire] :
       {std::pair{DataType::kFloat32, DataType::kFloat16}, std::pair{DataType::kFloat64, DataType::kBFloat16}}) {
    PartsCase c = PartsCase::make(OpKind::kReduceScatter, dtype, GetParam(), {3, 500, 17}, 3, 6);
    c.base.wire = wire;
    c.base.op = ReduceOp::kAverage;
    c.base.prescale = 0.5;
    c.base.mixed = true;
    cases.push_back(c.finish());
  }
  run_all_ways(cases, small_chunks(0));
}

// Slots that are wanted while somebody reads them, under every kind in turn, with late and early ranks.
TEST(ShmPartsSlots, RewrittenOnlyWhenAllHaveRead) {
  for (const int size : {2, 3, 5}) {
    std::vector<PartsCase> cases;
    for (uint64_t i = 0; i < 90; ++i) {
      PartsCase c = PartsCase::make(kKinds[i % 3], DataType::kFloat32, size, {i % 2 == 0 ? 50 : 900}, 4, i + 1);
      c.zero_ranks = mix(i);
      cases.push_back(c.finish());
    }
    const Expected expected = expect_all(cases);
    for (const auto& [spin, direct_bytes] : {std::pair{0, kNeverDirect}, {20, kNeverDirect}, {0, int64_t{1}}}) {
      EXPECT_EQ(run_threads(size, small_chunks(spin, direct_bytes),
                            [&](int rank, Backend& backend) -> std::string {
                              std::mt19937 random(static_cast<unsigned>(rank));
                              for (size_t i = 0; i < cases.size(); ++i) {
                                if (random() % 3 == 0) std::this_thread::sleep_for(microseconds(random() % 200));
                                std::string fault =
                                    run_case(cases[i], expected[i][static_cast<size_t>(rank)], rank, backend);
                                if (!fault.empty()) return fault;
                              }
                              return "";
                            }),
                "");
    }
  }
}

// Where the output is (part of) the input's memory. `at`: how far into its output a rank's input begins.
std::string run_aliased(OpKind kind, const std::vector<int64_t>& counts, int size,
                        const std::function<int64_t(int rank)>& at, int64_t direct_bytes) {
  return run_threads(size, small_chunks(0, direct_bytes), [&](int rank, Backend& backend) -> std::string {
    const auto value = [](int giver, int64_t i) { return static_cast<float>(giver * 100000 + i); };
    const auto n = static_cast<size_t>(size);
    const int64_t all = std::accumulate(counts.begin(), counts.end(), int64_t{0});
    int64_t in_count = all;
    if (kind == OpKind::kAllgather) in_count = counts[static_cast<size_t>(rank)];
    if (kind == OpKind::kAlltoall) in_count = all / size;
    int64_t out_count = all;
    if (kind == OpKind::kReduceScatter) out_count = counts[static_cast<size_t>(rank)];
    if (kind == OpKind::kAlltoall) out_count = all / size;
    std::vector<float> memory(static_cast<size_t>(2 * all), -1.0f);
    const int64_t shift = at(rank);
    float* in = memory.data() + (shift > 0 ? shift : 0);
    float* out = memory.data() + (shift < 0 ? -shift : 0);
    for (int64_t i = 0; i < in_count; ++i) in[i] = value(rank, i);
    Bucket bucket;
    bucket.kind = kind;
    bucket.segments = {{contiguous_view(in, DataType::kFloat32, {in_count}),
                        contiguous_view(out, DataType::kFloat32, {out_count}), counts}};
    bucket.elements = in_count;
    backend.run(bucket);
    std::vector<float> expected;
    if (kind == OpKind::kReduceScatter) {
      int64_t skipped = 0;
      for (int owner = 0; owner < rank; ++owner) skipped += counts[static_cast<size_t>(owner)];
      for (int64_t i = 0; i < out_count; ++i) {
        float sum = 0;
        for (int giver = 0; giver < size; ++giver) sum += value(giver, skipped + i);
        expected.push_back(sum);
      }
    } else {
      for (size_t giver = 0; giver < n; ++giver) {
        const bool pairs = kind == OpKind::kAlltoall;
        const size_t row = giver * n;
        const auto me = static_cast<size_t>(rank);
        const int64_t skipped = pairs ? std::accumulate(&counts[row], &counts[row + me], int64_t{0}) : 0;
        for (int64_t i = 0; i < (pairs ? counts[row + me] : counts[giver]); ++i) {
          expected.push_back(value(static_cast<int>(giver), skipped + i));
        }
      }
    }
    return std::equal(expected.begin(), expected.end(), out) ? "" : "wrong";
  });
}

TEST(ShmPartsAliased, OutputsMayOverlapInputs) {
  const std::vector<int64_t> uneven = {3000, 1000, 2000};
  const auto offset = [&](int rank) { return std::accumulate(uneven.begin(), uneven.begin() + rank, int64_t{0}); };
  const auto same = [](int) { return int64_t{0}; };
  const std::vector<int64_t> square = {500, 1500, 1000, 1000, 1000, 1000, 1500, 500, 1000};
  for (const int64_t direct : kDirect) {
    EXPECT_EQ(run_aliased(OpKind::kAllgather, uneven, 3, offset, direct), "");  // its own part of the output
    EXPECT_EQ(run_aliased(OpKind::kAllgather, uneven, 3, same, direct), "");
    EXPECT_EQ(run_aliased(OpKind::kReduceScatter, uneven, 3, [&](int rank) { return -offset(rank); }, direct), "");
    EXPECT_EQ(run_aliased(OpKind::kReduceScatter, uneven, 3, same, direct), "");
    EXPECT_EQ(run_aliased(OpKind::kReduceScatter, uneven, 3, [](int) { return int64_t{-700}; }, direct), "");
    EXPECT_EQ(run_aliased(OpKind::kAlltoall, square, 3, same, direct), "");
    EXPECT_EQ(
        run_aliased(OpKind::kAlltoall, square, 3, [](int rank) { return int64_t{rank * 300 - 300}; }, direct), "");
  }
}

// Large parts lie where the user has them, small ones are packed; both in one table, in turn.
TEST(ShmPartsDirect, PartsInPlaceAndPackedOnes) {
  for (const OpKind kind : {OpKind::kAllgather, OpKind::kAlltoall}) {
    std::vector<PartsCase> cases;
    for (uint64_t seed = 0; seed < 6; ++seed) {
      PartsCase c = PartsCase::make(kind, DataType::kFloat32, 3, {30'000, 3, 5, 20'000, 20'000, 7, 9000, 1}, 2, seed);
      c.base.mixed = seed % 2 == 1;
      cases.push_back(c.finish());
    }
    run_all_ways(cases, small_chunks(0));
  }
}

TEST(ShmPartsFaults, CountsThatContradictTheViewsAreRefused) {
  float data[8] = {};
  const TensorView four = contiguous_view(data, DataType::kFloat32, {4});
  for (const OpKind kind : kKinds) {
    for (const std::vector<int64_t>& counts : {std::vector<int64_t>{}, {3}, {-4}, {4, 0}}) {
      EXPECT_NE(run_threads(1, {},
                            [&](int, Backend& backend) -> std::string {
                              Bucket bucket;
                              bucket.kind = kind;
                              bucket.elements = 4;
                              bucket.segments = {{four, four, counts}};
                              backend.run(bucket);
                              return "";
                            }),
                "");
    }
  }
}

// Rank 1 never comes; the others wait for what it gives, or for a slot that it has not read.
TEST(ShmPartsFaults, AbortReachesThoseWhoWait) {
  for (const OpKind kind : kKinds) {
    for (const int64_t width : {4, 100'000, 4'000'000}) {
      const std::string faults = run_threads(3, {}, [&](int rank, Backend& backend) -> std::string {
        if (rank == 1) {
          std::this_thread::sleep_for(std::chrono::milliseconds(5));
          return "aborts";
        }
        const int64_t taken = kind == OpKind::kReduceScatter ? width : 3 * width;
        std::vector<float> in(static_cast<size_t>(kind == OpKind::kAllgather ? width : 3 * width));
        std::vector<float> out(static_cast<size_t>(taken));
        Bucket bucket;
        bucket.kind = kind;
        bucket.elements = static_cast<int64_t>(in.size());
        bucket.segments = {{contiguous_view(in.data(), DataType::kFloat32, {bucket.elements}),
                            contiguous_view(out.data(), DataType::kFloat32, {taken}),
                            std::vector<int64_t>(kind == OpKind::kAlltoall ? 9 : 3, width)}};
        try {
          for (;;) backend.run(bucket);
        } catch (const Error& error) {
          return error.code() == ErrorCode::kPeerLost ? "" : "another error";
        }
      });
      EXPECT_EQ(faults, "rank 1: aborts\n");
    }
  }
}

// A process that is killed while its memory is read: the reader waits until somebody who knows aborts.
#if !defined(__SANITIZE_THREAD__)
TEST(ShmPartsFaults, AbortFreesTheReadersOfAKilledProcess) {
  constexpr int64_t kCount = 1 << 18;
  SharedPages region(shm_region_bytes(2));
  const auto make = [&](int rank) {
    ShmOptions options;
    options.rank = rank;
    options.size = 2;
    options.spin = microseconds(0);
    options.direct_bytes = 1;
    return make_shm_backend(region.data(), options);
  };
  std::vector<float> in(kCount, 1.0f);
  std::vector<float> out(2 * kCount);
  Bucket bucket;
  bucket.kind = OpKind::kAllgather;
  bucket.elements = kCount;
  bucket.segments = {{contiguous_view(in.data(), DataType::kFloat32, {kCount}),
                      contiguous_view(out.data(), DataType::kFloat32, {2 * kCount}),
                      {kCount, kCount}}};
  const pid_t victim = fork();
  if (victim == 0) {
    const auto backend = make(1);
    for (;;) backend->run(bucket);
  }
  const auto backend = make(0);
  for (int i = 0; i < 3; ++i) backend->run(bucket);
  std::atomic<int> code{-1};
  std::atomic<int64_t> runs{0};
  std::thread reader([&] {
    try {
      for (;; ++runs) backend->run(bucket);
    } catch (const Error& error) {
      code = static_cast<int>(error.code());
    }
  });
  while (runs.load() < 100) std::this_thread::yield();
  kill(victim, SIGKILL);
  int status = 0;
  waitpid(victim, &status, 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(code.load(), -1);  // not before it is told
  backend->abort();
  reader.join();
  EXPECT_EQ(code.load(), static_cast<int>(ErrorCode::kPeerLost));
}
#endif

}  // namespace
}  // namespace fusewire::testing
