// Host staging: every kind of collective on CUDA tensors, bit for bit what the CPU plane gives, in whatever order the
// GPU does what it was asked for.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <type_traits>

#include "collective/staged/staged_backend.h"
#include "collective/staged/staged_plan.h"
#include "common/error.h"
#include "gpu_world.h"
#include "shm_parts_case.h"
#include "simt/stand_in.h"

namespace fusewire::testing {
namespace {

constexpr size_t kSmallChunk = 1024;

struct Staged {
  Staged(int rank, int size, Backend& cpu, size_t chunk_bytes, uint64_t seed)
      : gpu(seed * 16 + static_cast<uint64_t>(rank)),
        host(cpu, *gpu.cuda),
        plane(make_staged_backend(gpu.device, {.rank = rank, .size = size}, host, chunk_bytes)),
        to_the_end(*plane, gpu) {}

  GpuOfRank gpu;
  OnHost host;
  std::unique_ptr<Backend> plane;
  ToTheEnd to_the_end;
};

ShmOptions shm_options() {
  ShmOptions options;
  options.chunk_bytes = 4096;
  options.spin = std::chrono::microseconds(0);
  return options;
}

std::string describe(const Case& c) { return c.describe(); }
std::string describe(const PartsCase& c) { return c.base.describe(); }

// Every case `seeds` times, each time with work done in another order; a few cases share a GPU.
template <class Cases, class Expected>
void run_staged(const Cases& cases, const Expected& expected, int size, uint64_t seeds = 2,
                size_t chunk_bytes = kSmallChunk) {
  const std::string faults = run_threads(size, shm_options(), [&](int rank, Backend& cpu) -> std::string {
    for (uint64_t seed = 0; seed < seeds; ++seed) {
      for (size_t first = 0; first < cases.size(); first += 3) {
        Staged staged(rank, size, cpu, chunk_bytes, seed);
        const auto last = std::min(first + 3, cases.size());
        for (size_t i = first; i < last; ++i) {
          std::string fault;
          if constexpr (std::is_same_v<typename Cases::value_type, Case>) {
            fault = run_case(cases[i], expected[i], rank, staged.to_the_end);
          } else {
            fault = run_case(cases[i], expected[i][static_cast<size_t>(rank)], rank, staged.to_the_end);
          }
          if (!fault.empty()) return fault + " seed " + std::to_string(seed);
        }
        std::string mistakes = staged.gpu.mistakes();
        if (!mistakes.empty()) return describe(cases[first]) + ": " + mistakes;
      }
    }
    return "";
  });
  EXPECT_EQ(faults, "");
}

void run_all(const std::vector<Case>& cases, uint64_t seeds = 2, size_t chunk_bytes = kSmallChunk) {
  run_staged(cases, expect_all(cases), cases.front().size, seeds, chunk_bytes);
}

void run_all(const std::vector<PartsCase>& cases, uint64_t seeds = 2, size_t chunk_bytes = kSmallChunk) {
  run_staged(cases, expect_all(cases), cases.front().base.size, seeds, chunk_bytes);
}

class GpuStaged : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, GpuStaged, ::testing::Values(1, 2, 3, 4));

TEST_P(GpuStaged, AllreduceOfEveryTypeInEveryLayout) {
  std::vector<Case> cases;
  for (int t = 0; t < kDataTypeCount; ++t) {
    for (const bool mixed : {false, true}) {
      Case c;
      c.size = GetParam();
      c.dtype = c.wire = static_cast<DataType>(t);
      if (c.dtype == DataType::kBool) c.op = ReduceOp::kMax;
      c.shapes = {{3}, {7, 5}, {0}, {1}, {30, 20}, {9}};
      c.mixed = mixed;
      c.out_of_place = t % 2 == 0;
      c.seed = static_cast<uint64_t>(t) * 2 + mixed;
      cases.push_back(c);
    }
  }
  run_all(cases);
}

TEST_P(GpuStaged, EveryOperatorScaledAndCompressed) {
  std::vector<Case> cases;
  for (int o = 0; o < kReduceOpCount; ++o) {
    const auto op = static_cast<ReduceOp>(o);
    if (op == ReduceOp::kAdasum) continue;
    for (const DataType dtype : {DataType::kFloat32, DataType::kBFloat16, DataType::kInt32, DataType::kFloat64}) {
      for (const auto& [pre, post] : {std::pair{1.0, 1.0}, std::pair{0.25, 4.0}, std::pair{-0.5, 1.0 / 3}}) {
        Case c;
        c.size = GetParam();
        c.dtype = c.wire = dtype;
        c.op = op;
        c.prescale = pre;
        c.postscale = post;
        c.shapes = {{40}, {17, 9}, {5}};
        c.mixed = o % 2 == 0;
        cases.push_back(c);
        if (dtype == DataType::kFloat32 || dtype == DataType::kFloat64) {
          c.wire = dtype == DataType::kFloat32 ? DataType::kFloat16 : DataType::kBFloat16;
          cases.push_back(c);
        }
      }
    }
  }
  run_all(cases, 1);
}

// Tensors that fill a chunk, miss it by an element on either side, and take several.
TEST_P(GpuStaged, TensorsOnBothSidesOfAChunk) {
  std::vector<Case> cases;
  for (const int64_t count : {255, 256, 257, 512, 513, 2500}) {
    Case c;
    c.size = GetParam();
    c.shapes = {{count}, {3}, {count}, {count + 1}, {2}};
    c.op = ReduceOp::kAverage;
    cases.push_back(c);
    c.kind = OpKind::kBroadcast;
    c.out_of_place = true;
    c.root = c.size - 1;
    cases.push_back(c);
    c.kind = OpKind::kAllreduce;
    c.mixed = true;
    cases.push_back(c);
  }
  run_all(cases, 2);
}

TEST_P(GpuStaged, BroadcastFromEveryRoot) {
  std::vector<Case> cases;
  for (int root = 0; root < GetParam(); ++root) {
    for (const DataType dtype : {DataType::kUInt8, DataType::kFloat16, DataType::kComplex128}) {
      for (const bool mixed : {false, true}) {
        Case c;
        c.size = GetParam();
        c.kind = OpKind::kBroadcast;
        c.root = root;
        c.dtype = c.wire = dtype;
        c.shapes = {{100}, {0, 3}, {50, 41}, {1}};
        c.mixed = mixed;
        c.seed = static_cast<uint64_t>(root) + 10;
        cases.push_back(c);
      }
    }
  }
  run_all(cases);
}

constexpr OpKind kPartKinds[] = {OpKind::kAllgather, OpKind::kAlltoall, OpKind::kReduceScatter};

TEST_P(GpuStaged, PartsOfEveryTypeInEveryLayout) {
  for (const OpKind kind : kPartKinds) {
    std::vector<PartsCase> cases;
    for (int t = 0; t < kDataTypeCount; ++t) {
      for (const bool mixed : {false, true}) {
        PartsCase c = PartsCase::make(kind, static_cast<DataType>(t), GetParam(), {1, 3, 40, 200, 9}, 5,
                                      static_cast<uint64_t>(t) * 2 + mixed);
        if (c.base.dtype == DataType::kBool) c.base.op = ReduceOp::kMax;
        c.base.mixed = mixed;
        cases.push_back(c.finish());
      }
    }
    run_all(cases, 1);
  }
}

TEST_P(GpuStaged, RanksWithoutRows) {
  std::vector<PartsCase> cases;
  for (uint64_t seed = 0; seed < 8; ++seed) {
    for (const OpKind kind : kPartKinds) {
      PartsCase c = PartsCase::make(kind, DataType::kFloat32, GetParam(), {5, 300, 1}, seed % 4 == 3 ? 0 : 6, seed);
      c.zero_ranks = seed < 4 ? uint64_t{1} << seed : seed * 37;
      cases.push_back(c.finish());
    }
  }
  run_all(cases);
}

TEST_P(GpuStaged, ReduceScatterScaledAndCompressed) {
  std::vector<PartsCase> cases;
  for (const DataType wire : {DataType::kFloat32, DataType::kFloat16}) {
    for (const ReduceOp op : {ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kProduct}) {
      PartsCase c = PartsCase::make(OpKind::kReduceScatter, DataType::kFloat32, GetParam(), {3, 500, 17}, 3, 6);
      c.base.wire = wire;
      c.base.op = op;
      c.base.prescale = -0.5;
      c.base.postscale = 3.0;
      c.base.mixed = true;
      cases.push_back(c.finish());
    }
  }
  run_all(cases);
}

// What the plane for CPU tensors gives for the same tensors is what is expected, whatever the rule (shm_adasum_test.cc
// checks that).
std::string run_adasum(const std::vector<Dims>& shapes, DataType dtype, DataType wire, int size, uint64_t seed) {
  return run_threads(size, shm_options(), [&](int rank, Backend& cpu) -> std::string {
    Case c;
    c.size = size;
    c.dtype = dtype;
    c.mixed = true;
    c.seed = seed;
    std::vector<std::vector<std::vector<std::byte>>> results;
    int runs = 0;
    for (const bool staged : {false, true}) {
      Staged gpu(rank, size, cpu, kSmallChunk, seed);
      Bucket bucket;
      bucket.op = ReduceOp::kAdasum;
      bucket.dtype = dtype;
      bucket.wire = wire;
      bucket.prescale = -0.5;
      bucket.postscale = 3.0;
      std::vector<OwnedTensor> tensors;
      for (size_t t = 0; t < shapes.size(); ++t) {
        tensors.emplace_back(dtype, shapes[t], c.layout(rank, t, 0));
        tensors.back().write(make_values(dtype, numel(shapes[t]), seed + t * 100 + static_cast<uint64_t>(rank)).data());
        bucket.segments.push_back({tensors.back().view(), tensors.back().view()});
        if (c.absent(rank, t)) bucket.segments.back().input.data = nullptr;
        bucket.elements += numel(shapes[t]);
      }
      (staged ? gpu.to_the_end : cpu).run(bucket);
      auto& rows = results.emplace_back();
      for (OwnedTensor& tensor : tensors) rows.push_back(tensor.read());
      std::string mistakes = gpu.gpu.mistakes();
      if (!mistakes.empty()) return mistakes;
      runs = gpu.host.runs;
    }
    if (runs != 3) return "cut into " + std::to_string(runs);
    return results[0] == results[1] ? "" : "not the same";
  });
}

TEST_P(GpuStaged, AdasumIsNeverCutInsideATensor) {
  // Small ones together, one that is larger than a chunk, small ones again.
  const std::vector<Dims> shapes = {{10}, {0}, {3, 4}, {30, 50}, {7}, {1}};
  for (const DataType dtype : {DataType::kFloat16, DataType::kBFloat16, DataType::kFloat32, DataType::kFloat64}) {
    EXPECT_EQ(run_adasum(shapes, dtype, dtype, GetParam(), 3), "") << to_string(dtype);
  }
  EXPECT_EQ(run_adasum(shapes, DataType::kFloat32, DataType::kFloat16, GetParam(), 4), "");
}

// Outputs that overlap inputs other than in the rank's own place, in several chunks.
TEST(GpuStagedAliased, OutputsMayOverlapInputs) {
  constexpr int kSize = 3;
  const std::vector<int64_t> uneven = {3000, 1000, 2000};
  const std::vector<int64_t> square = {500, 1500, 1000, 1000, 1000, 1000, 1500, 500, 1000};
  for (const OpKind kind : kPartKinds) {
    for (const int64_t shift : {0, 700, -700}) {
      const std::vector<int64_t>& counts = kind == OpKind::kAlltoall ? square : uneven;
      EXPECT_EQ(run_threads(kSize, shm_options(),
                            [&](int rank, Backend& cpu) -> std::string {
                              std::vector<std::vector<int32_t>> results;
                              for (const bool staged : {false, true}) {
                                Staged gpu(rank, kSize, cpu, kSmallChunk, static_cast<uint64_t>(shift + 1000));
                                std::vector<int32_t> memory(8000, -1);
                                Bucket bucket;
                                bucket.kind = kind;
                                bucket.dtype = bucket.wire = DataType::kInt32;
                                const auto own = static_cast<size_t>(rank);
                                int64_t in = 3000;
                                int64_t out = 3000;
                                if (kind == OpKind::kAllgather) in = uneven[own], out = 6000;
                                if (kind == OpKind::kReduceScatter) in = 6000, out = uneven[own];
                                int32_t* const input = memory.data() + std::max<int64_t>(shift, 0);
                                for (int64_t i = 0; i < in; ++i) input[i] = static_cast<int32_t>(rank * 10000 + i);
                                int32_t* const output = memory.data() - std::min<int64_t>(shift, 0);
                                bucket.segments = {{contiguous_view(input, DataType::kInt32, {in}),
                                                    contiguous_view(output, DataType::kInt32, {out}), counts}};
                                bucket.elements = in;
                                (staged ? gpu.to_the_end : cpu).run(bucket);
                                results.emplace_back(output, output + out);
                                std::string mistakes = gpu.gpu.mistakes();
                                if (!mistakes.empty()) return mistakes;
                              }
                              return results[0] == results[1] ? "" : "not the same";
                            }),
                "")
          << to_string(kind) << " " << shift;
    }
  }
}

// However many tensors: one launch, one copy, one collective, one copy, one launch. (Two more copies carry tables.)
TEST(GpuStagedLaunches, ASmallBucketTakesOneOfEach) {
  EXPECT_EQ(run_threads(2, shm_options(),
                        [](int rank, Backend& cpu) -> std::string {
                          Staged staged(rank, 2, cpu, kStagedChunkBytes, 1);
                          Case c;
                          c.shapes.assign(100, {17});
                          const uint64_t before = simt::launches();
                          std::string fault = run_case(c, expect_all({c})[0], rank, staged.to_the_end);
                          if (!fault.empty()) return fault;
                          if (simt::launches() - before != 2) return "launches";
                          return staged.host.runs == 1 ? "" : "collectives";
                        }),
            "");
}

// Chunks tell of their steps in elements of the bucket.
TEST(GpuStagedTrace, StepsAreToldInElementsOfTheBucket) {
  struct Steps : ChunkTrace {
    void chunk(ChunkStep step, Clock::time_point begin, Clock::time_point end, int64_t from, int64_t to) override {
      EXPECT_LE(begin, end);
      EXPECT_LT(from, to);
      last = std::max(last, to);
      ++count[static_cast<size_t>(step)];
    }
    int64_t last = 0;
    std::array<int, kChunkStepCount> count{};
  };
  EXPECT_EQ(run_threads(2, shm_options(),
                        [](int rank, Backend& cpu) -> std::string {
                          Staged staged(rank, 2, cpu, kSmallChunk, 1);
                          std::vector<float> values(2000, 1.0f);
                          Steps steps;
                          Bucket bucket;
                          bucket.trace = &steps;
                          bucket.elements = 2000;
                          const TensorView view = contiguous_view(values.data(), DataType::kFloat32, {2000});
                          bucket.segments = {{view, view}};
                          staged.to_the_end.run(bucket);
                          if (steps.last != 2000) return "ends elsewhere";
                          for (const ChunkStep step : {ChunkStep::kPack, ChunkStep::kReduce, ChunkStep::kUnpack}) {
                            if (steps.count[static_cast<size_t>(step)] < staged.host.runs) return "a step is missing";
                          }
                          return "";
                        }),
            "");
}

Bucket ones(std::vector<float>& values) {
  Bucket bucket;
  bucket.elements = static_cast<int64_t>(values.size());
  const TensorView view = contiguous_view(values.data(), DataType::kFloat32, {bucket.elements});
  bucket.segments = {{view, view}};
  return bucket;
}

// A plane that fails in its n-th run, or of which nobody is asked any more.
class Fails : public Backend {
 public:
  Fails(Backend& plane, int at) : plane_(plane), left_(at) {}
  std::string_view name() const override { return plane_.name(); }
  void run(const Bucket& bucket) override {
    if (left_-- == 0) throw Error(ErrorCode::kCollective, "as it was told");
    plane_.run(bucket);
  }
  void abort() noexcept override { plane_.abort(); }
  void check() override { plane_.check(); }
  std::vector<int> laggards() const override { return plane_.laggards(); }

 private:
  Backend& plane_;
  int left_;
};

// One rank's collective fails in the middle of a pipeline: the others fail too, nothing is torn from under copies in
// flight, and later runs throw at once.
TEST(GpuStagedFaults, AFailureInTheMiddleIsEverybodys) {
  for (int at = 0; at < 6; ++at) {
    for (uint64_t seed = 0; seed < 3; ++seed) {
      EXPECT_EQ(run_threads(3, shm_options(),
                            [&](int rank, Backend& cpu) -> std::string {
                              Fails failing(cpu, rank == 1 ? at : -1);
                              GpuOfRank gpu(seed * 3 + static_cast<uint64_t>(rank));
                              const auto plane =
                                  make_staged_backend(gpu.device, {.rank = rank, .size = 3}, failing, kSmallChunk);
                              std::vector<float> values(6 * 256, 1.0f);
                              const Bucket bucket = ones(values);
                              for (int run = 0; run < 2; ++run) {
                                try {
                                  plane->run(bucket);
                                  return "did not fail";
                                } catch (const Error& error) {
                                  const bool own = rank == 1 && run == 0;
                                  if (error.code() != (own ? ErrorCode::kCollective : ErrorCode::kPeerLost)) {
                                    return error.what();
                                  }
                                }
                              }
                              // Memory is lent again only when the copies are through.
                              for (int i = 0; i < 20; ++i) {
                                const GpuLoan pinned(*gpu.device, GpuMemory::kPinned, kSmallChunk);
                                gpu.cuda->host_uses(pinned.get(), kSmallChunk, true);
                              }
                              return gpu.mistakes();
                            }),
                "");
    }
  }
}

// A GPU that fails: the others do not wait for what that rank will never give.
TEST(GpuStagedFaults, AGpuThatFailsStopsTheOthers) {
  class Broken : public CudaDouble {
   public:
    using CudaDouble::CudaDouble;
    void copy(void* to, const void* from, size_t bytes, Stream stream) override {
      if (++copies_ == 5) throw Error(ErrorCode::kCollective, "an illegal memory access was encountered");
      CudaDouble::copy(to, from, bytes, stream);
    }

   private:
    int copies_ = 0;
  };
  EXPECT_EQ(run_threads(2, shm_options(),
                        [&](int rank, Backend& cpu) -> std::string {
                          const std::shared_ptr<CudaDouble> cuda =
                              rank == 0 ? std::make_shared<CudaDouble>(1) : std::make_shared<Broken>(1);
                          const auto device = std::make_shared<GpuDevice>(cuda, 0, cuda->create_stream());
                          const auto plane = make_staged_backend(device, {.rank = rank, .size = 2}, cpu, kSmallChunk);
                          std::vector<float> values(6 * 256, 1.0f);
                          const Bucket bucket = ones(values);
                          const Error error = [&] {
                            try {
                              plane->run(bucket);
                            } catch (const Error& thrown) {
                              return thrown;
                            }
                            return Error(ErrorCode::kInternal, "did not fail");
                          }();
                          if (error.code() != (rank == 0 ? ErrorCode::kPeerLost : ErrorCode::kCollective)) {
                            return error.what();
                          }
                          return "";
                        }),
            "");
}

TEST(GpuStagedFaults, AbortReachesThoseWhoWaitAndStays) {
  const std::string faults = run_threads(3, shm_options(), [](int rank, Backend& cpu) -> std::string {
    Staged staged(rank, 3, cpu, kSmallChunk, 1);
    if (rank == 1) staged.plane->abort();
    std::vector<float> values(5000, 1.0f);
    const Bucket bucket = ones(values);
    for (int run = 0; run < 2; ++run) {
      try {
        staged.plane->run(bucket);
        return "did not fail";
      } catch (const Error& error) {
        if (error.code() != ErrorCode::kPeerLost) return "another error";
      }
    }
    try {
      staged.plane->check();
      return "nothing wrong";
    } catch (const Error&) {
    }
    return staged.gpu.mistakes();
  });
  EXPECT_EQ(faults, "");
}

TEST(GpuStagedFaults, ABucketThatContradictsItselfIsRefused) {
  const std::string faults = run_threads(1, {}, [](int, Backend& cpu) -> std::string {
    Staged staged(0, 1, cpu, kSmallChunk, 1);
    std::vector<float> values(10, 1.0f);
    Bucket bucket = ones(values);
    bucket.segments[0].output.sizes = {9};
    staged.plane->run(bucket);
    return "";
  });
  EXPECT_NE(faults.find("contradicts itself"), std::string::npos) << faults;
}

}  // namespace
}  // namespace fusewire::testing
