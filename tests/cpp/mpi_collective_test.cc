// Every collective over the MPI double: all operators, dtypes, layouts and ragged counts, bit for bit against what
// shared memory must give too.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include "mpi_world.h"
#include "shm_case.h"
#include "shm_parts_case.h"
#include "shm_world.h"

namespace fusewire::testing {
namespace {

MpiOptions small_messages(size_t bytes = 1024) {
  MpiOptions options;
  options.message_bytes = bytes;
  options.spin = std::chrono::microseconds(0);
  return options;
}

template <typename AnyCase>
void run(int size, const std::vector<AnyCase>& cases, const MpiOptions& options, std::vector<int> mpi_ranks = {}) {
  const auto expected = expect_all(cases);
  MpiWorld world(size, {}, std::move(mpi_ranks));
  EXPECT_EQ(world.with_backends(options,
                                [&](int rank, Backend& backend) { return run_cases(cases, expected, rank, backend); }),
            "");
  for (const auto& rank : world.ranks) EXPECT_EQ(rank->mpi.open_requests(), 0u);
}

void scale_all(std::vector<std::byte>& doubles, double factor) {
  for (size_t i = 0; i < doubles.size(); i += sizeof(double)) {
    double value;
    std::memcpy(&value, doubles.data() + i, sizeof(value));
    value *= factor;
    std::memcpy(doubles.data() + i, &value, sizeof(value));
  }
}

class MpiCollective : public ::testing::TestWithParam<int> {};
#if defined(__SANITIZE_THREAD__)
INSTANTIATE_TEST_SUITE_P(Ranks, MpiCollective, ::testing::Values(2, 3));
#else
INSTANTIATE_TEST_SUITE_P(Ranks, MpiCollective, ::testing::Values(1, 2, 3, 4, 5, 7));
#endif

// Small enough for one round of messages, and too large for it.
const std::vector<Dims> kSmall = {{3}, {}, {2, 5}, {0}, {130}};
const std::vector<Dims> kLarge = {{3}, {70, 41}, {0}, {2}, {9000}, {64, 65}};

TEST_P(MpiCollective, AllreduceOfEveryTypeAndOperator) {
  for (const auto& shapes : {kSmall, kLarge}) {
    std::vector<Case> cases;
    for (int t = 0; t < kDataTypeCount; ++t) {
      for (const ReduceOp op :
           {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct}) {
        const auto dtype = static_cast<DataType>(t);
        if (!supports(dtype, op)) continue;
        for (const bool mixed : {false, true}) {
          Case c;
          c.size = GetParam();
          c.dtype = c.wire = dtype;
          c.op = op;
          c.shapes = shapes;
          c.mixed = mixed;
          c.seed = static_cast<uint64_t>(t) * 10 + mixed;
          cases.push_back(c);
        }
      }
    }
    run(GetParam(), cases, small_messages());
  }
}

TEST_P(MpiCollective, ScalesAndNarrowWires) {
  std::vector<Case> cases;
  for (const auto& shapes : {kSmall, kLarge}) {
    for (const DataType wire : {DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16}) {
      for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kProduct}) {
        Case c;
        c.size = GetParam();
        c.wire = wire;
        c.op = op;
        c.prescale = -0.5;
        c.postscale = 3.0;
        c.shapes = shapes;
        c.out_of_place = op == ReduceOp::kSum;
        c.mixed = op == ReduceOp::kAverage;
        cases.push_back(c);
      }
    }
  }
  run(GetParam(), cases, small_messages());
}

TEST_P(MpiCollective, BroadcastFromEveryRoot) {
  std::vector<Case> cases;
  for (int root = 0; root < GetParam(); ++root) {
    for (const bool mixed : {false, true}) {
      for (const auto& shapes : {kSmall, kLarge}) {
        Case c;
        c.size = GetParam();
        c.kind = OpKind::kBroadcast;
        c.dtype = c.wire = DataType::kInt16;
        c.root = root;
        c.shapes = shapes;
        c.mixed = mixed;
        c.seed = static_cast<uint64_t>(root);
        cases.push_back(c);
      }
    }
  }
  run(GetParam(), cases, small_messages());
}

TEST_P(MpiCollective, PartsOfEveryTypeInEveryLayout) {
  std::vector<PartsCase> cases;
  for (const OpKind kind : {OpKind::kAllgather, OpKind::kAlltoall, OpKind::kReduceScatter}) {
    for (int t = 0; t < kDataTypeCount; ++t) {
      for (const bool mixed : {false, true}) {
        const uint64_t seed = static_cast<uint64_t>(t) * 2 + mixed;
        PartsCase c = PartsCase::make(kind, static_cast<DataType>(t), GetParam(), {1, 3, 40, 700, 9}, 7, seed);
        if (c.base.dtype == DataType::kBool) c.base.op = ReduceOp::kMax;
        c.base.mixed = mixed;
        c.zero_ranks = seed % 5;
        cases.push_back(c.finish());
      }
    }
    cases.push_back(PartsCase::make(kind, DataType::kInt8, GetParam(), {}, 1, 3).finish());
    cases.push_back(PartsCase::make(kind, DataType::kInt8, GetParam(), {5000}, 0, 3).finish());
  }
  run(GetParam(), cases, small_messages());
}

TEST_P(MpiCollective, ManyBucketsBackToBack) {
  std::vector<Case> cases;
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Case c;
    c.size = GetParam();
    c.seed = seed;
    c.mixed = seed % 3 == 0;
    c.kind = seed % 5 == 4 ? OpKind::kBroadcast : OpKind::kAllreduce;
    c.root = static_cast<int>(seed) % GetParam();
    c.shapes.assign(1 + seed % 7, {static_cast<int64_t>(mix(seed) % (seed % 2 == 0 ? 300 : 30000))});
    cases.push_back(c);
  }
  run(GetParam(), cases, small_messages(4096));
}

// Adasum's rule has tests of its own; here the planes must agree on every bit, in every layout, and where fp64 has to
// be rescaled.
TEST_P(MpiCollective, AdasumGivesTheBitsOfSharedMemory) {
  for (const DataType dtype : {DataType::kFloat16, DataType::kBFloat16, DataType::kFloat32, DataType::kFloat64}) {
    for (const auto& shapes : {kSmall, kLarge}) {
      for (const double prescale : {1.0, 1e-200}) {
        if (prescale != 1.0 && dtype != DataType::kFloat64) continue;
        std::vector<std::vector<std::byte>> by_shm(static_cast<size_t>(GetParam()));
        std::vector<std::vector<std::byte>> by_mpi(static_cast<size_t>(GetParam()));
        const auto body = [&](std::vector<std::vector<std::byte>>& results) {
          return [&, dtype](int rank, Backend& backend) -> std::string {
            Bucket bucket;
            bucket.op = ReduceOp::kAdasum;
            bucket.dtype = bucket.wire = dtype;
            bucket.postscale = 0.5;
            std::vector<OwnedTensor> tensors;
            for (size_t t = 0; t < shapes.size(); ++t) {
              auto values = make_values(dtype, numel(shapes[t]), t * 100 + static_cast<uint64_t>(rank));
              if (prescale != 1.0) scale_all(values, prescale);
              tensors.emplace_back(dtype, shapes[t],
                                   (t + static_cast<size_t>(rank)) % 3 == 0 ? Layout::kGaps : Layout::kDense);
              tensors.back().write(values.data());
            }
            for (size_t t = 0; t < shapes.size(); ++t) {
              bucket.segments.push_back({tensors[t].view(), tensors[t].view()});
              if (rank == 1 && t == 1) bucket.segments.back().input.data = nullptr;
              bucket.elements += numel(shapes[t]);
            }
            backend.run(bucket);
            auto& result = results[static_cast<size_t>(rank)];
            for (OwnedTensor& tensor : tensors) {
              const auto row = tensor.read();
              result.insert(result.end(), row.begin(), row.end());
            }
            return "";
          };
        };
        EXPECT_EQ(run_threads(GetParam(), {}, body(by_shm)), "");
        MpiWorld world(GetParam());
        EXPECT_EQ(world.with_backends(small_messages(64), body(by_mpi)), "");
        EXPECT_EQ(by_mpi, by_shm) << to_string(dtype) << ' ' << prescale;
        for (const auto& row : by_mpi) EXPECT_EQ(row, by_mpi[0]);
      }
    }
  }
}

TEST(MpiJobTest, RanksOfTheJobMayBeOtherRanksOfMpi) {
  std::vector<Case> cases;
  for (const auto& shapes : {kSmall, kLarge}) {
    Case c;
    c.size = 4;
    c.shapes = shapes;
    cases.push_back(c);
    c.kind = OpKind::kBroadcast;
    c.root = 2;
    cases.push_back(c);
  }
  run(4, cases, small_messages(), {2, 0, 3, 1});
}

// Two overlapping sets whose buckets are interleaved.
TEST(MpiJobTest, SetsShareACommunicator) {
  MpiWorld world(3);
  std::atomic<uint32_t> stops[2] = {};
  const std::vector<std::vector<int32_t>> sets = {{0, 1}, {1, 2}};
  const auto faults = world.on_ranks([&](int rank, MpiRank& self) -> std::string {
    self.join(rank, 3);
    for (int round = 0; round < 20; ++round) {
      for (size_t s = 0; s < 2; ++s) {
        const auto me = std::find(sets[s].begin(), sets[s].end(), rank);
        if (me == sets[s].end()) continue;
        MpiOptions options = small_messages();
        options.ranks = sets[s];
        options.rank = static_cast<int>(me - sets[s].begin());
        options.process_set = static_cast<uint32_t>(s) + 1;
        const auto backend = make_mpi_backend(self.job, options, StopWord(stops[s]));
        Case c;
        c.seed = static_cast<uint64_t>(round) * 2 + s;
        c.shapes = round % 2 == 0 ? kSmall : kLarge;
        const auto expected = expect_all(std::vector<Case>{c});
        if (const std::string fault = run_case(c, expected[0], options.rank, *backend); !fault.empty()) return fault;
      }
    }
    return "";
  });
  EXPECT_EQ(faults, std::vector<std::string>(3));
}

// More than an int can count, from where it lies, in pieces that MPI can count.
TEST(MpiJobTest, TensorsPastTwoToTheThirtyOne) {
  constexpr int64_t kCount = (int64_t{1} << 31) + 4096;
  MpiWorld world(2);
  world.fabric.payload = false;
  const auto fault = world.with_backends({}, [&](int rank, Backend& backend) -> std::string {
    void* const memory =
        mmap(nullptr, kCount, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return "no address space";
    Bucket bucket;
    bucket.kind = OpKind::kBroadcast;
    bucket.dtype = bucket.wire = DataType::kInt8;
    bucket.root = 0;
    bucket.elements = kCount;
    const TensorView view = contiguous_view(memory, DataType::kInt8, {kCount});
    bucket.segments.push_back({view, view});
    backend.run(bucket);
    std::string wrong;
    if (rank == 0) {
      int64_t next = 0;
      for (const auto& message : world.fabric.log) {
        if (message->data != static_cast<std::byte*>(memory) + next) wrong = "a piece lies elsewhere";
        next += message->bytes;
      }
      if (next != kCount) wrong += "pieces add up to " + std::to_string(next);
    }
    munmap(memory, kCount);
    return wrong;
  });
  EXPECT_EQ(fault, "");
}

}  // namespace
}  // namespace fusewire::testing
