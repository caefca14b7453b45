// The device's reduction on the stand-in: the same bits as the CPU's.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda_kernels.h"
#include "kernels_data.h"
#include "simt/stand_in.h"

namespace fusewire::testing {
namespace {

class DeviceReduce : public ::testing::TestWithParam<DataType> {
 protected:
  void check(ReduceOp op, int source_count, size_t count, Flavour flavour, double factor, int64_t divisor, bool align,
             bool in_place) {
    const size_t size = size_of(GetParam());
    std::vector<std::unique_ptr<Buffer>> memory;
    std::vector<const void*> sources;
    for (int s = 0; s < source_count; ++s) {
      const size_t misalign = align ? 0 : size * static_cast<size_t>(random_.below(4));
      memory.push_back(std::make_unique<Buffer>(count * size, misalign));
      random_.fill(GetParam(), flavour, memory.back()->data(), count);
      sources.push_back(memory.back()->data());
    }
    Buffer expected(count * size, 0);
    reference_.reduce({.sources = sources.data(),
                       .source_count = source_count,
                       .destination = expected.data(),
                       .count = count,
                       .dtype = GetParam(),
                       .op = op,
                       .scale = {factor, divisor}});
    Buffer own(count * size, align ? 0 : size);
    Buffer& result = in_place ? *memory[static_cast<size_t>(random_.below(source_count))] : own;
    DeviceReduceArgs args;
    std::copy(sources.begin(), sources.end(), args.sources);
    args.source_count = source_count;
    args.destination = result.data();
    args.count = count;
    args.dtype = GetParam();
    args.op = op;
    args.factor = factor;
    args.divisor = divisor;
    simt::seed(random_.bits());
    const uint64_t before = simt::launches();
    ASSERT_EQ(kCudaKernels.reduce(args), 0);
    ASSERT_EQ(simt::launches() - before, count == 0 ? 0u : 1u);
    const int64_t at = first_difference(GetParam(), expected.data(), result.data(), count);
    ASSERT_EQ(at, -1) << to_string(op) << " of " << source_count << ", " << count << " elements: expected "
                      << hex(expected.data(), static_cast<size_t>(at), size) << ", got "
                      << hex(result.data(), static_cast<size_t>(at), size);
    for (const auto& buffer : memory) ASSERT_TRUE(buffer->guards_intact());
    ASSERT_TRUE(own.guards_intact());
  }

  std::vector<ReduceOp> ops() const {
    std::vector<ReduceOp> allowed;
    for (const ReduceOp op : kOps) {
      if (supports(GetParam(), op)) allowed.push_back(op);
    }
    return allowed;
  }

  Random random_{77};
  const CpuKernels& reference_ = *available_cpu_kernels().front();
};

TEST_P(DeviceReduce, SizesSourcesAndAlignments) {
  const auto tile = static_cast<int64_t>(8192 / size_of(real_type(GetParam())));
  for (const ReduceOp op : ops()) {
    const int64_t divisor = op == ReduceOp::kAverage ? 3 : 1;
    for (const int sources : {1, 2, 3, 4, 7, kMaxReduceSources}) {
      for (const int64_t count : {int64_t{0}, int64_t{1}, int64_t{5}, 1 + random_.below(2 * tile), tile + 1}) {
        const bool align = random_.below(3) != 0;
        ASSERT_NO_FATAL_FAILURE(check(op, sources, static_cast<size_t>(count), Flavour::kOrdinary, 1.0, divisor, align,
                                      random_.below(2) == 0));
      }
    }
  }
}

TEST_P(DeviceReduce, EveryBitPatternAndScale) {
  for (const Flavour flavour : kFlavours) {
    for (const ReduceOp op : ops()) {
      for (const double factor : {1.0, 1.0 / 3, 1e-60, 8.0}) {
        const int64_t divisor = op == ReduceOp::kAverage ? 1 + random_.below(5) : 1;
        if (GetParam() == DataType::kBool && factor != 1.0) continue;
        ASSERT_NO_FATAL_FAILURE(check(op, 1 + static_cast<int>(random_.below(5)), 1200, flavour, factor, divisor, true,
                                      random_.below(2) == 0))
            << "times " << factor << " / " << divisor;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, DeviceReduce, ::testing::ValuesIn(all_types()),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST(DeviceReduceArgs, SourcesAreCounted) {
  DeviceReduceArgs args;
  args.count = 1;
  EXPECT_NE(kCudaKernels.reduce(args), 0);
  args.source_count = kMaxReduceSources + 1;
  EXPECT_NE(kCudaKernels.reduce(args), 0);
}

}  // namespace
}  // namespace fusewire::testing
