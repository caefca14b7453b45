// Dot products and linear combinations: every table against the plain reference, bit for bit, and the reference against
// long double.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "kernels_data.h"

namespace fusewire::testing {
namespace {

struct Case {
  const CpuKernels* table;
  DataType dtype;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const CpuKernels* table : available_cpu_kernels()) {
    for (const DataType dtype : kFloatingTypes) all.push_back({table, dtype});
  }
  return all;
}

bool same(double a, double b) { return (a != a && b != b) || std::memcmp(&a, &b, sizeof(a)) == 0; }

class AdasumTable : public ::testing::TestWithParam<Case> {
 protected:
  const CpuKernels& reference_ = *available_cpu_kernels().front();
  Random random_{77};

  struct Sources {
    std::vector<Buffer> buffers;
    std::vector<const void*> pointers;
    std::vector<double> scales;
    std::vector<double> coefficients;
  };

  Sources make(int count, size_t elements, size_t offset, Flavour flavour) {
    Sources made;
    for (int s = 0; s < count; ++s) {
      made.buffers.emplace_back(elements * size_of(GetParam().dtype), (offset * static_cast<size_t>(s + 1)) % 64);
      random_.fill(GetParam().dtype, flavour, made.buffers.back().data(), elements);
      made.scales.push_back(std::ldexp(1.0, static_cast<int>(random_.below(9)) - 4));
      made.coefficients.push_back(random_.uniform() * 2);
    }
    for (Buffer& buffer : made.buffers) made.pointers.push_back(buffer.data());
    return made;
  }

  std::vector<double> dots(const CpuKernels& table, const Sources& sources, size_t count) {
    const auto n = sources.pointers.size();
    std::vector<double> result(n * (n + 1) / 2, -1.0);
    table.dots({.sources = sources.pointers.data(),
                .scales = sources.scales.data(),
                .source_count = static_cast<int>(n),
                .count = count,
                .dtype = GetParam().dtype,
                .dots = result.data()});
    return result;
  }
};

TEST_P(AdasumTable, DotsEqualReference) {
  for (const Flavour flavour : kFlavours) {
    for (const int sources : {1, 2, 3, 4, 5, 8}) {
      for (const size_t count : {0, 1, 7, 15, 16, 17, 33, 1000}) {
        const Sources made = make(sources, count, count % 5, flavour);
        const std::vector<double> expected = dots(reference_, made, count);
        const std::vector<double> result = dots(*GetParam().table, made, count);
        for (size_t p = 0; p < expected.size(); ++p) {
          ASSERT_TRUE(same(expected[p], result[p]))
              << GetParam().table->isa << " sources " << sources << " count " << count << " pair " << p;
        }
      }
    }
  }
}

TEST_P(AdasumTable, DotsAreTheSumsOfProducts) {
  const Sources made = make(3, 1001, 0, Flavour::kOrdinary);
  const std::vector<double> result = dots(*GetParam().table, made, 1001);
  const bool scaled = GetParam().dtype == DataType::kFloat64;
  size_t pair = 0;
  for (size_t i = 0; i < 3; ++i) {
    for (size_t j = i; j < 3; ++j, ++pair) {
      long double sum = 0;
      long double size = 0;
      for (size_t e = 0; e < 1001; ++e) {
        long double term = static_cast<long double>(read_floating(GetParam().dtype, made.pointers[i], e)) *
                           read_floating(GetParam().dtype, made.pointers[j], e);
        if (scaled) term *= made.scales[i] * made.scales[j];
        sum += term;
        size += std::abs(term);
      }
      EXPECT_NEAR(result[pair], static_cast<double>(sum), static_cast<double>(size) * 1e-14);
    }
  }
}

TEST_P(AdasumTable, CombinationsEqualReference) {
  const DataType dtype = GetParam().dtype;
  for (const Flavour flavour : kFlavours) {
    for (const int sources : {1, 2, 3, 5}) {
      for (const size_t count : {0, 1, 9, 31, 32, 33, 777, 9001}) {
        Sources made = make(sources, count, count % 7, flavour);
        Buffer expected(count * size_of(dtype), 0);
        Buffer second(count * size_of(dtype), 3);
        CombineArgs args{.sources = made.pointers.data(),
                         .scales = made.scales.data(),
                         .coefficients = made.coefficients.data(),
                         .source_count = sources,
                         .factor = count % 2 == 0 ? 1.0 : 0.25,
                         .destination = expected.data(),
                         .count = count,
                         .dtype = dtype};
        reference_.combine(args);
        args.destination = made.buffers.back().data();  // one of the sources
        args.second = count % 2 == 0 ? second.data() : nullptr;
        GetParam().table->combine(args);
        ASSERT_EQ(first_difference(dtype, expected.data(), args.destination, count), -1)
            << GetParam().table->isa << " sources " << sources << " count " << count;
        ASSERT_TRUE(made.buffers.back().guards_intact() && second.guards_intact());
        if (args.second != nullptr) {
          ASSERT_EQ(std::memcmp(second.data(), args.destination, second.size()), 0);
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, AdasumTable, ::testing::ValuesIn(cases()), [](const auto& info) {
  return std::string(info.param.table->isa) + "_" + std::string(to_string(info.param.dtype));
});

}  // namespace
}  // namespace fusewire::testing
