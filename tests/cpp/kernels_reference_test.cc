// The plain reference against arithmetic that shares nothing with it: long double, 128-bit integers, and rounding by
// quanta.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "kernels_data.h"

namespace fusewire::testing {
namespace {

using element::BFloat16;
using element::Half;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// ---- conversions ----

struct Format {
  int digits;        // of the significand, the implicit one included
  int min_exponent;  // of the smallest normal
  double largest;
};
constexpr Format kHalf = {11, -14, 65504.0};
constexpr Format kBFloat = {8, -126, 0x1.fep127};

double value_of(const Format& format, uint16_t bits) {
  const int fraction = format.digits - 1;
  const int biased = (bits & 0x7fff) >> fraction;
  const int significand = bits & ((1 << fraction) - 1);
  const double sign = bits & 0x8000 ? -1 : 1;
  if (biased == (0x7fff >> fraction)) return significand != 0 ? NAN : sign * kInfinity;
  if (biased == 0) return sign * std::ldexp(significand, format.min_exponent - fraction);
  return sign * std::ldexp(significand + (1 << fraction), format.min_exponent + biased - 1 - fraction);
}

double round_to(const Format& format, double x) {
  if (!std::isfinite(x) || x == 0) return x;
  const int exponent = std::max(std::ilogb(x), format.min_exponent);
  const double quantum = std::ldexp(1.0, exponent - format.digits + 1);
  const double rounded = std::nearbyint(x / quantum) * quantum;
  return std::fabs(rounded) > format.largest ? std::copysign(kInfinity, x) : rounded;
}

template <class T>
void expect_conversions(const Format& format) {
  const auto expect = [&](double x) {
    const double result = element::to_double(element::Convert<T>::from(x));
    const double expected = round_to(format, x);
    ASSERT_TRUE(result == expected && std::signbit(result) == std::signbit(expected))
        << x << " became " << result << " not " << expected;
    const float single = static_cast<float>(x);
    ASSERT_EQ(element::to_double(element::Convert<T>::from(single)), round_to(format, single)) << single;
  };
  for (int bits = 0; bits <= 0xffff; ++bits) {
    const T x{static_cast<uint16_t>(bits)};
    const double value = value_of(format, x.bits);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(element::to_double(x)));
      ASSERT_TRUE(std::isnan(element::to_double(element::Convert<T>::from(element::to_float(x)))));
      ASSERT_TRUE(std::isnan(element::to_double(element::Convert<T>::from(element::to_double(x)))));
      continue;
    }
    ASSERT_EQ(element::to_double(x), value);
    if (!std::isfinite(value)) continue;
    // The point half way to the next value, and its neighbours as far as a double can tell them apart.
    const double next = value_of(format, static_cast<uint16_t>(bits + 1));
    const double middle =
        std::isfinite(next) ? value + (next - value) / 2 : value * (1 + std::ldexp(0.5, -format.digits));
    for (const double point : {value, middle}) {
      expect(point);
      expect(std::nextafter(point, kInfinity));
      expect(std::nextafter(point, -kInfinity));
    }
  }
  for (const double x : {1e300, -1e300, 1e-300, -1e-300, 0.0, -0.0, 65519.9, 65520.0, 0x1.ffp127, 0x1.feffffp127})
    expect(x);
  EXPECT_TRUE(std::isnan(element::to_double(element::Convert<T>::from(static_cast<double>(NAN)))));
}

TEST(Element, HalfConversionsRoundOnce) { expect_conversions<Half>(kHalf); }
TEST(Element, BFloat16ConversionsRoundOnce) { expect_conversions<BFloat16>(kBFloat); }

TEST(Element, TruncateIsDefinedEverywhere) {
  EXPECT_EQ(element::truncate(2.9), 2u);
  EXPECT_EQ(element::truncate(-2.9), static_cast<uint64_t>(-2));
  EXPECT_EQ(element::truncate(-0x1p63), 0x8000000000000000u);
  EXPECT_EQ(element::truncate(0x1p63), 0x8000000000000000u);
  EXPECT_EQ(element::truncate(0x1.8p63), 0xc000000000000000u);
  EXPECT_EQ(element::truncate(0x1p64), 0u);
  EXPECT_EQ(element::truncate(0x1.0000000000003p64), 0x3000u);
  EXPECT_EQ(element::truncate(-0x1.0000000000003p64), static_cast<uint64_t>(-0x3000));
  EXPECT_EQ(element::truncate(0x1.0000000000001p115), 0x8000000000000000u);
  EXPECT_EQ(element::truncate(0x1.0000000000001p116), 0u);
  EXPECT_EQ(element::truncate(1e300), 0u);
  EXPECT_EQ(element::truncate(kInfinity), 0u);
  EXPECT_EQ(element::truncate(-kInfinity), 0u);
  EXPECT_EQ(element::truncate(NAN), 0u);
}

// ---- reductions ----

class Reference : public ::testing::Test {
 protected:
  Random random_{7};

  // Reduces typed vectors with the reference.
  template <class T>
  std::vector<T> reduce(DataType dtype, ReduceOp op, const std::vector<std::vector<T>>& inputs, Scale scale) {
    std::vector<const void*> pointers;
    for (const auto& input : inputs) pointers.push_back(input.data());
    std::vector<T> result(inputs.front().size());
    available_cpu_kernels().front()->reduce({.sources = pointers.data(),
                                             .source_count = static_cast<int>(inputs.size()),
                                             .destination = result.data(),
                                             .count = result.size() * sizeof(T) / size_of(dtype),
                                             .dtype = dtype,
                                             .op = op,
                                             .scale = scale});
    return result;
  }

  template <class T>
  void integers(DataType dtype);
};

template <class T>
void Reference::integers(DataType dtype) {
  __extension__ using Wide = __int128;
  for (const Flavour flavour : {Flavour::kOrdinary, Flavour::kAnyBits}) {
    for (const size_t sources : {1, 2, 3, 5}) {
      std::vector<std::vector<T>> inputs(sources, std::vector<T>(200));
      for (auto& input : inputs) random_.fill(dtype, flavour, input.data(), input.size());
      const auto sum = reduce<T>(dtype, ReduceOp::kSum, inputs, {});
      const auto average = reduce<T>(dtype, ReduceOp::kAverage, inputs, {1.0, static_cast<int64_t>(sources)});
      const auto scaled = reduce<T>(dtype, ReduceOp::kSum, inputs, {0.375, 2});
      const auto least = reduce<T>(dtype, ReduceOp::kMin, inputs, {});
      const auto most = reduce<T>(dtype, ReduceOp::kMax, inputs, {});
      const auto product = reduce<T>(dtype, ReduceOp::kProduct, inputs, {});
      for (size_t i = 0; i < 200; ++i) {
        Wide total = 0;
        Wide low = inputs[0][i];
        Wide high = inputs[0][i];
        uint64_t times = 1;
        for (const auto& input : inputs) {
          total += input[i];
          low = std::min<Wide>(low, input[i]);
          high = std::max<Wide>(high, input[i]);
          times *= static_cast<uint64_t>(input[i]);
        }
        ASSERT_EQ(sum[i], static_cast<T>(total));
        ASSERT_EQ(least[i], static_cast<T>(low));
        ASSERT_EQ(most[i], static_cast<T>(high));
        ASSERT_EQ(product[i], static_cast<T>(times));
        // The exact mean, truncated toward zero, wherever the sum fits the 64-bit accumulator.
        const Wide limit = static_cast<Wide>(1) << 63;
        if (total >= -limit && total < limit) {
          ASSERT_EQ(average[i], static_cast<T>(total / static_cast<Wide>(sources)));
          ASSERT_EQ(scaled[i], static_cast<T>(static_cast<Wide>(static_cast<double>(total) * 0.375 / 2)));
        }
      }
    }
  }
}

TEST_F(Reference, Int8) { integers<int8_t>(DataType::kInt8); }
TEST_F(Reference, UInt8) { integers<uint8_t>(DataType::kUInt8); }
TEST_F(Reference, Int16) { integers<int16_t>(DataType::kInt16); }
TEST_F(Reference, UInt16) { integers<uint16_t>(DataType::kUInt16); }
TEST_F(Reference, Int32) { integers<int32_t>(DataType::kInt32); }
TEST_F(Reference, UInt32) { integers<uint32_t>(DataType::kUInt32); }
TEST_F(Reference, Int64) { integers<int64_t>(DataType::kInt64); }
TEST_F(Reference, UInt64) { integers<uint64_t>(DataType::kUInt64); }

TEST_F(Reference, IntegerAverageTruncatesTowardZero) {
  EXPECT_EQ((reduce<int32_t>(DataType::kInt32, ReduceOp::kAverage, {{-3, 3, -1, 1}, {-4, 4, 0, 0}}, {1.0, 2})),
            (std::vector<int32_t>{-3, 3, 0, 0}));
  EXPECT_EQ((reduce<int8_t>(DataType::kInt8, ReduceOp::kAverage, {{-100, 127}, {-100, 127}, {-101, 127}}, {1.0, 3})),
            (std::vector<int8_t>{-100, 127}));
}

// A prescale of .25 and a postscale of 4 meet as the factor 1: nothing is lost in between.
TEST_F(Reference, IntegerScalesAreAppliedToTheSumOnce) {
  EXPECT_EQ((reduce<int64_t>(DataType::kInt64, ReduceOp::kSum, {{2, 4, 6, 16}, {2, 4, 6, 16}}, {0.25 * 4, 1})),
            (std::vector<int64_t>{4, 8, 12, 32}));
  EXPECT_EQ((reduce<int64_t>(DataType::kInt64, ReduceOp::kSum, {{-3, 3, 5}, {-2, 2, 5}}, {0.25, 1})),
            (std::vector<int64_t>{-1, 1, 2}));
  EXPECT_EQ((reduce<uint8_t>(DataType::kUInt8, ReduceOp::kSum, {{200}, {200}}, {-1.0, 1})),
            (std::vector<uint8_t>{static_cast<uint8_t>(-400)}));
}

TEST_F(Reference, Bool) {
  const std::vector<std::vector<uint8_t>> inputs = {{0, 0, 1, 1, 7}, {0, 1, 0, 1, 1}};
  const std::vector<uint8_t> all = {0, 0, 0, 1, 1};
  const std::vector<uint8_t> any = {0, 1, 1, 1, 1};
  EXPECT_EQ(reduce<uint8_t>(DataType::kBool, ReduceOp::kMin, inputs, {}), all);
  EXPECT_EQ(reduce<uint8_t>(DataType::kBool, ReduceOp::kProduct, inputs, {}), all);
  EXPECT_EQ(reduce<uint8_t>(DataType::kBool, ReduceOp::kMax, inputs, {}), any);
  EXPECT_EQ(reduce<uint8_t>(DataType::kBool, ReduceOp::kSum, inputs, {}), any);
}

double half_unit(DataType dtype, double x) {
  const int digits = dtype == DataType::kFloat16    ? 11
                     : dtype == DataType::kBFloat16 ? 8
                     : dtype == DataType::kFloat32  ? 24
                                                    : 53;
  const double floor = smallest_normal(dtype);
  return std::ldexp(1.0, std::ilogb(std::max(std::fabs(x), floor)) - digits);
}

// Within one rounding of the exact result: half a unit, plus what the wide accumulator may lose.
TEST_F(Reference, FloatsAreWithinOneRounding) {
  for (const DataType dtype : kFloatingTypes) {
    const double loss = dtype == DataType::kFloat32 ? 0x1p-53 : dtype == DataType::kFloat64 ? 0x1p-53 : 0x1p-24;
    for (const size_t sources : {1, 2, 3, 4, 7}) {
      for (const Scale scale : {Scale{1.0, 1}, Scale{1.0, static_cast<int64_t>(sources)}, Scale{0.3, 4}}) {
        std::vector<std::vector<unsigned char>> inputs(sources, std::vector<unsigned char>(100 * size_of(dtype)));
        for (auto& input : inputs) random_.fill(dtype, Flavour::kOrdinary, input.data(), 100);
        const auto result = reduce<unsigned char>(dtype, ReduceOp::kSum, inputs, scale);
        for (size_t i = 0; i < 100; ++i) {
          long double exact = 0;
          double size = 0;
          for (const auto& input : inputs) {
            exact += read_floating(dtype, input.data(), i);
            size += std::fabs(read_floating(dtype, input.data(), i));
          }
          const long double ratio = static_cast<long double>(scale.factor) / scale.divisor;
          exact *= ratio;
          const double slack = static_cast<double>(ratio) * size * loss * static_cast<double>(sources + 2);
          ASSERT_LE(std::fabs(static_cast<double>(read_floating(dtype, result.data(), i) - exact)),
                    half_unit(dtype, static_cast<double>(exact)) + slack)
              << to_string(dtype) << " of " << sources;
        }
      }
    }
  }
}

TEST_F(Reference, ComplexIsTwoReals) {
  const std::vector<std::vector<float>> inputs = {{1, 2, 3, 4}, {5, -6, 7, -8}};
  EXPECT_EQ(reduce<float>(DataType::kComplex64, ReduceOp::kAverage, inputs, {1.0, 2}),
            (std::vector<float>{3, -2, 5, -2}));
  EXPECT_EQ((reduce<double>(DataType::kComplex128, ReduceOp::kSum, {{1, 2}, {3, 4}}, {2.0, 1})),
            (std::vector<double>{8, 12}));
}

TEST_F(Reference, NanWinsMinAndMax) {
  for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
    const auto result =
        reduce<double>(DataType::kFloat64, op, {{1, NAN, 3, kInfinity}, {2, 2, NAN, -kInfinity}, {3, 3, 3, 0}}, {});
    EXPECT_EQ(result[0], op == ReduceOp::kMin ? 1 : 3);
    EXPECT_TRUE(std::isnan(result[1]) && std::isnan(result[2]));
    EXPECT_EQ(result[3], op == ReduceOp::kMin ? -kInfinity : kInfinity);
  }
}

// ---- sums that overflow on the way to a representable result ----

TEST_F(Reference, Float64AverageIsFiniteWhereTheMeanIs) {
  const double top = largest(DataType::kFloat64);
  const auto average = [&](const std::vector<double>& values, double factor = 1.0) {
    std::vector<std::vector<double>> inputs;
    for (const double x : values) inputs.push_back({x});
    return reduce<double>(DataType::kFloat64, ReduceOp::kAverage, inputs,
                          {factor, static_cast<int64_t>(values.size())})[0];
  };
  EXPECT_EQ(average({top, top}), top);
  EXPECT_EQ(average({top, top, top}), top);
  EXPECT_EQ(average({-top, -top, -top, -top, -top}), -top);
  EXPECT_EQ(average({0x1p1023, 0x1.8p1023}), 0x1.4p1023);
  EXPECT_EQ(average({top, top, -top, -top}), 0.0);
  EXPECT_EQ(average({top, top, -top}), top / 3);
  EXPECT_EQ(average({0x1p1000, 0x1p1000}, 0x1p24), kInfinity);
  EXPECT_EQ(average({0x1p1000, 0x1p1000}, 0x1p23), 0x1p1023);  // the factor overflows before the divisor helps
  EXPECT_EQ(average({0x1p1023, 0x1p1023}, 0x1p-1070), 0x1p-47);
  EXPECT_EQ(average({top, top}, 2.0), kInfinity);
  EXPECT_EQ(average({top, kInfinity}), kInfinity);
  EXPECT_EQ(average({top, top, -kInfinity}), -kInfinity);
  EXPECT_TRUE(std::isnan(average({top, top, NAN})));
  EXPECT_TRUE(std::isnan(average({kInfinity, -kInfinity})));
}

TEST_F(Reference, Float64SumSurvivesAnOverflowThatCancels) {
  const double top = largest(DataType::kFloat64);
  EXPECT_EQ(reduce<double>(DataType::kFloat64, ReduceOp::kSum, {{top}, {top}, {-top}}, {})[0], top);
  EXPECT_EQ(reduce<double>(DataType::kFloat64, ReduceOp::kSum, {{top}, {top}}, {})[0], kInfinity);
}

TEST_F(Reference, NarrowAveragesAreFiniteWhereTheMeanIs) {
  for (const DataType dtype : kFloatingTypes) {
    for (const size_t sources : {2, 3, 4, 5, 8}) {
      std::vector<std::vector<unsigned char>> inputs(sources, std::vector<unsigned char>(size_of(dtype)));
      for (auto& input : inputs) write_floating(dtype, input.data(), 0, largest(dtype));
      const auto result =
          reduce<unsigned char>(dtype, ReduceOp::kAverage, inputs, {1.0, static_cast<int64_t>(sources)});
      EXPECT_EQ(read_floating(dtype, result.data(), 0), largest(dtype)) << to_string(dtype) << " of " << sources;
    }
  }
}

// ---- identities ----

TEST_F(Reference, IdentityIsNeutral) {
  for (const DataType dtype : all_types()) {
    for (const ReduceOp op : kOps) {
      if (!supports(dtype, op)) continue;
      for (const Flavour flavour : kFlavours) {
        constexpr size_t kCount = 100;
        std::vector<unsigned char> value(kCount * size_of(dtype));
        std::vector<unsigned char> neutral(kCount * size_of(dtype));
        random_.fill(dtype, flavour, value.data(), kCount);
        fill_identity(dtype, op, neutral.data(), kCount);
        for (const auto& inputs : {std::vector{value, neutral}, std::vector{neutral, value, neutral}}) {
          const auto result = reduce<unsigned char>(dtype, op, inputs, {});
          ASSERT_EQ(first_difference(dtype, value.data(), result.data(), kCount), -1)
              << to_string(dtype) << " " << to_string(op);
        }
      }
    }
  }
}

}  // namespace
}  // namespace fusewire::testing
