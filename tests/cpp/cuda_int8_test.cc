// Block-scaled int8 on the stand-in: what the Python compressor computes, value by value.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "kernels/cuda_kernels.h"
#include "kernels_data.h"
#include "simt/stand_in.h"

namespace fusewire::testing {
namespace {

template <class W>
struct Quantised {
  std::vector<int8_t> levels;
  std::vector<float> scales;
  std::vector<W> left;
};

// torch: (x / scale).round().clamp(-127, 127), NaN as 0, scale = largest |x| of the block / 127 and 1 where that is 0.
template <class W>
Quantised<W> quantise(const std::vector<W>& values, size_t block) {
  const size_t blocks = (values.size() + block - 1) / block;
  Quantised<W> result{std::vector<int8_t>(blocks * block), std::vector<float>(blocks), std::vector<W>(values.size())};
  for (size_t b = 0; b < blocks; ++b) {
    const size_t end = std::min(values.size(), (b + 1) * block);
    W largest = 0;
    for (size_t i = b * block; i < end; ++i) {
      const W size = std::fabs(values[i]);
      if (size > largest || size != size) largest = size;
      if (largest != largest) break;
    }
    const float scale = static_cast<float>(largest / static_cast<W>(127));
    result.scales[b] = scale;
    for (size_t i = b * block; i < end; ++i) {
      const W ratio = std::nearbyint(values[i] / (scale == 0 ? static_cast<W>(1) : static_cast<W>(scale)));
      const W level = ratio != ratio ? 0 : std::clamp<W>(ratio, -127, 127);
      result.levels[i] = static_cast<int8_t>(level);
      result.left[i] = values[i] - level * static_cast<W>(scale);
    }
  }
  return result;
}

template <class T>
bool same(const std::vector<T>& a, const std::vector<T>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](T x, T y) { return x == y || (x != x && y != y); });
}

class Int8 : public ::testing::TestWithParam<DataType> {
 protected:
  template <class W>
  void check(size_t count, uint32_t block, Flavour flavour, bool with_error) {
    Buffer memory(count * size_of(GetParam()), 0);
    random_.fill(GetParam(), flavour, memory.data(), count);
    if (count > 2 * block) std::memset(memory.data() + block * size_of(GetParam()), 0, block * size_of(GetParam()));
    std::vector<W> values(count);
    std::vector<W> error(count);
    for (size_t i = 0; i < count; ++i) {
      error[i] = with_error ? static_cast<W>(random_.uniform()) : 0;
      values[i] = static_cast<W>(read_floating(GetParam(), memory.data(), i));
      if (with_error) values[i] += error[i];
    }
    const Quantised<W> expected = quantise(values, block);

    Quantised<W> got{std::vector<int8_t>(expected.levels.size(), 99), std::vector<float>(expected.scales.size()),
                     error};
    DeviceQuantiseArgs args;
    args.values = memory.data();
    args.dtype = GetParam();
    args.count = count;
    args.block = block;
    args.error_in = with_error ? got.left.data() : nullptr;
    args.error_out = got.left.data();
    args.quantised = got.levels.data();
    args.scales = got.scales.data();
    simt::seed(random_.bits());
    ASSERT_EQ(kCudaKernels.quantise(args), 0);
    ASSERT_TRUE(same(got.scales, expected.scales));
    ASSERT_TRUE(same(got.levels, expected.levels));
    ASSERT_TRUE(same(got.left, expected.left));

    // Two payloads are added to what is there, in order.
    std::vector<int8_t> levels = expected.levels;
    levels.insert(levels.end(), expected.levels.rbegin(), expected.levels.rend());
    std::vector<float> scales = expected.scales;
    scales.insert(scales.end(), expected.scales.rbegin(), expected.scales.rend());
    std::vector<W> total(count, static_cast<W>(0.5));
    std::vector<W> sums = total;
    const size_t padded = expected.levels.size();
    for (size_t i = 0; i < count; ++i) {
      for (size_t p = 0; p < 2; ++p) {
        sums[i] += static_cast<W>(levels[p * padded + i]) * static_cast<W>(scales[p * padded / block + i / block]);
      }
      sums[i] *= static_cast<W>(0.25);
    }
    DeviceDequantiseArgs back;
    back.quantised = levels.data();
    back.scales = scales.data();
    back.payloads = 2;
    back.block = block;
    back.count = count;
    back.total = total.data();
    back.dtype = std::is_same_v<W, double> ? DataType::kFloat64 : DataType::kFloat32;
    back.factor = 0.25;
    ASSERT_EQ(kCudaKernels.dequantise(back), 0);
    ASSERT_TRUE(same(total, sums));

    // One payload, written over whatever is there.
    std::fill(total.begin(), total.end(), static_cast<W>(NAN));
    back.payloads = 1;
    back.overwrite = true;
    back.factor = 1.0;
    ASSERT_EQ(kCudaKernels.dequantise(back), 0);
    for (size_t i = 0; i < count; ++i) {
      sums[i] = static_cast<W>(0) + static_cast<W>(levels[i]) * static_cast<W>(scales[i / block]);
    }
    ASSERT_TRUE(same(total, sums));
  }

  Random random_{4};
};

TEST_P(Int8, BlocksSizesAndFlavours) {
  for (const Flavour flavour : kFlavours) {
    for (const uint32_t block : {256u, 32u, 1u, 100u, 1024u}) {
      for (const size_t count : {size_t{1}, size_t{70}, size_t{255}, size_t{256}, size_t{257}, size_t{2600}}) {
        if (count > 100 * block) continue;  // one warp each: enough is enough
        for (const bool with_error : {false, true}) {
          if (GetParam() == DataType::kFloat64) {
            ASSERT_NO_FATAL_FAILURE(check<double>(count, block, flavour, with_error));
          } else {
            ASSERT_NO_FATAL_FAILURE(check<float>(count, block, flavour, with_error));
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, Int8, ::testing::ValuesIn(kFloatingTypes),
                         [](const auto& info) { return std::string(to_string(info.param)); });

TEST(Int8Args, WhatNoKernelServesIsAnError) {
  DeviceQuantiseArgs args;
  args.count = 1;
  args.dtype = DataType::kInt32;
  EXPECT_NE(kCudaKernels.quantise(args), 0);
  args.dtype = DataType::kFloat32;
  args.block = 0;
  EXPECT_NE(kCudaKernels.quantise(args), 0);
}

}  // namespace
}  // namespace fusewire::testing
