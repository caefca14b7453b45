// Casts and copies of every table against the plain reference.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "kernels_data.h"

namespace fusewire::testing {
namespace {

class Table : public ::testing::TestWithParam<const CpuKernels*> {
 protected:
  const CpuKernels& reference_ = *available_cpu_kernels().front();
  const CpuKernels& table_ = *GetParam();
  Random random_{99};
};

TEST_P(Table, CastsEqualTheReference) {
  for (const DataType from : kFloatingTypes) {
    for (const DataType to : kFloatingTypes) {
      for (const Flavour flavour : kFlavours) {
        for (const double factor : {1.0, 0.5, 1.0 / 3, -7.0, 0x1p-150, 0x1p900, 0.0}) {
          for (const size_t count : {0, 1, 5, 16, 33, 127, 1000}) {
            const size_t offset = static_cast<size_t>(random_.below(64));
            Buffer source(count * size_of(from), offset);
            random_.fill(from, flavour, source.data(), count);
            Buffer expected(count * size_of(to), 0);
            Buffer result(count * size_of(to), static_cast<size_t>(random_.below(64)));
            reference_.cast(from, source.data(), to, expected.data(), count, factor);
            table_.cast(from, source.data(), to, result.data(), count, factor);
            const int64_t wrong = first_difference(to, expected.data(), result.data(), count);
            ASSERT_EQ(wrong, -1) << to_string(from) << " to " << to_string(to) << " times " << factor << ": "
                                 << hex(source.data(), static_cast<size_t>(wrong), size_of(from)) << " became "
                                 << hex(result.data(), static_cast<size_t>(wrong), size_of(to)) << " not "
                                 << hex(expected.data(), static_cast<size_t>(wrong), size_of(to));
            ASSERT_TRUE(result.guards_intact());
          }
        }
      }
    }
  }
}

// All 2^16 bit patterns, and every float around the ties between two of them.
TEST_P(Table, NarrowCastsEqualTheReferenceOnEveryPattern) {
  for (const DataType narrow : {DataType::kFloat16, DataType::kBFloat16}) {
    std::vector<uint16_t> patterns(0x10000);
    for (size_t i = 0; i < patterns.size(); ++i) patterns[i] = static_cast<uint16_t>(i);
    for (const DataType wide : {DataType::kFloat32, DataType::kFloat64}) {
      Buffer expected(patterns.size() * size_of(wide), 0);
      Buffer result(patterns.size() * size_of(wide), 0);
      reference_.cast(narrow, patterns.data(), wide, expected.data(), patterns.size(), 1.0);
      table_.cast(narrow, patterns.data(), wide, result.data(), patterns.size(), 1.0);
      ASSERT_EQ(first_difference(wide, expected.data(), result.data(), patterns.size()), -1);
    }
    const int shift = narrow == DataType::kFloat16 ? 13 : 16;
    std::vector<float> points;
    for (uint32_t i = 0; i < 1u << (32 - shift); ++i) {
      for (const uint32_t low : {0u, 1u, (1u << (shift - 1)) - 1, 1u << (shift - 1), (1u << (shift - 1)) + 1}) {
        points.push_back(element::bits_as<float>((i << shift) + low));
      }
    }
    Buffer expected(points.size() * 2, 0);
    Buffer result(points.size() * 2, 0);
    reference_.cast(DataType::kFloat32, points.data(), narrow, expected.data(), points.size(), 1.0);
    table_.cast(DataType::kFloat32, points.data(), narrow, result.data(), points.size(), 1.0);
    const int64_t wrong = first_difference(narrow, expected.data(), result.data(), points.size());
    ASSERT_EQ(wrong, -1) << hex(points.data(), static_cast<size_t>(wrong), 4);
  }
}

TEST_P(Table, CopiesEverySizeAtEveryAlignment) {
  const auto check = [&](size_t bytes, size_t from, size_t to) {
    Buffer source(bytes, from);
    for (size_t i = 0; i < bytes; ++i) source.data()[i] = static_cast<unsigned char>(random_.bits());
    Buffer result(bytes, to);
    table_.copy(result.data(), source.data(), bytes);
    ASSERT_EQ(std::memcmp(result.data(), source.data(), bytes), 0) << bytes << " from " << from << " to " << to;
    ASSERT_TRUE(result.guards_intact()) << bytes;
  };
  for (size_t bytes = 0; bytes < 700; ++bytes) {
    ASSERT_NO_FATAL_FAILURE(check(bytes, bytes % 7, 0));
    ASSERT_NO_FATAL_FAILURE(check(bytes, 0, static_cast<size_t>(random_.below(64))));
  }
  for (size_t offset = 0; offset < 64; ++offset) {
    ASSERT_NO_FATAL_FAILURE(check(1000 + offset, offset, 63 - offset));
    ASSERT_NO_FATAL_FAILURE(check(4096, 0, offset));
  }
}

TEST(Kernels, TheBestTableIsTheLastAvailable) {
  const auto tables = available_cpu_kernels();
  ASSERT_GE(tables.size(), 2u);
  EXPECT_EQ(tables.front()->isa, "reference");
  EXPECT_EQ(&cpu_kernels(), tables.back());
}

INSTANTIATE_TEST_SUITE_P(, Table, ::testing::ValuesIn(available_cpu_kernels()),
                         [](const auto& info) { return std::string(info.param->isa); });

}  // namespace
}  // namespace fusewire::testing
