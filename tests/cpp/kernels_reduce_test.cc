// Every table against the plain reference, bit for bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "kernels_data.h"

namespace fusewire::testing {
namespace {

struct Case {
  const CpuKernels* table;
  DataType dtype;
  ReduceOp op;
};

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const CpuKernels* table : available_cpu_kernels()) {
    if (table->isa == "reference") continue;
    for (const DataType dtype : all_types()) {
      for (const ReduceOp op : kOps) {
        if (supports(dtype, op)) all.push_back({table, dtype, op});
      }
    }
  }
  return all;
}

std::vector<Scale> scales(DataType dtype, ReduceOp op, int sources) {
  std::vector<Scale> all = {{1.0, 1}, {0.5, 1}, {0.3, 1}, {-3.0, 1}, {0x1p-140, 1}, {0x1p200, 1}, {0.0, 1}};
  if (op == ReduceOp::kAverage || (op == ReduceOp::kSum && dtype != DataType::kBool)) {
    all.insert(all.end(), {{1.0, sources}, {0.7, sources}, {1.0, 2}, {1.0, 7}, {3.0, 1024}});
  }
  return all;
}

class ReduceTable : public ::testing::TestWithParam<Case> {
 protected:
  const CpuKernels& reference_ = *available_cpu_kernels().front();
  Random random_{20240607};

  void compare(int sources, size_t count, size_t offset, Flavour flavour) {
    const auto& [table, dtype, op] = GetParam();
    const size_t bytes = count * size_of(dtype);
    std::vector<Buffer> input;
    std::vector<const void*> pointers;
    for (int s = 0; s < sources; ++s) {
      input.emplace_back(bytes, (offset * static_cast<size_t>(s + 1)) % 64);
      random_.fill(dtype, flavour, input.back().data(), count);
    }
    for (const Buffer& buffer : input) pointers.push_back(buffer.data());
    for (const Scale& scale : scales(dtype, op, sources)) {
      Buffer expected(bytes, 0);
      Buffer result(bytes, offset);
      Buffer second(bytes, (offset + 1) % 64);
      ReduceArgs args{.sources = pointers.data(),
                      .source_count = sources,
                      .destination = expected.data(),
                      .count = count,
                      .dtype = dtype,
                      .op = op,
                      .scale = scale};
      reference_.reduce(args);
      args.destination = result.data();
      args.second = count % 2 == 0 ? second.data() : nullptr;
      table->reduce(args);
      const int64_t wrong = first_difference(dtype, expected.data(), result.data(), count);
      ASSERT_EQ(wrong, -1) << table->isa << " sources " << sources << " count " << count << " offset " << offset
                           << " factor " << scale.factor << " divisor " << scale.divisor << ": expected "
                           << hex(expected.data(), static_cast<size_t>(wrong), size_of(dtype)) << " got "
                           << hex(result.data(), static_cast<size_t>(wrong), size_of(dtype));
      ASSERT_TRUE(result.guards_intact() && second.guards_intact());
      if (args.second != nullptr) {
        ASSERT_EQ(std::memcmp(second.data(), result.data(), bytes), 0);
      }
    }
  }
};

TEST_P(ReduceTable, EqualsReference) {
  for (const Flavour flavour : kFlavours) {
    for (const int sources : {1, 2, 3, 4, 5, 8}) {
      for (const size_t count : {0, 1, 3, 15, 16, 17, 66, 131, 1000}) {
        ASSERT_NO_FATAL_FAILURE(compare(sources, count, 0, flavour));
      }
    }
  }
}

TEST_P(ReduceTable, EqualsReferenceAtEveryOffset) {
  for (size_t offset = 0; offset < 64; ++offset) {
    ASSERT_NO_FATAL_FAILURE(compare(2, 70 + offset, offset, Flavour::kOrdinary));
    ASSERT_NO_FATAL_FAILURE(compare(3, 200 - offset, offset, Flavour::kAnyBits));
  }
}

TEST_P(ReduceTable, EqualsReferenceAtEveryTail) {
  for (size_t count = 0; count < 140; ++count) {
    ASSERT_NO_FATAL_FAILURE(compare(2, count, size_of(GetParam().dtype), Flavour::kOrdinary));
  }
}

// A slot that holds a rank's own contribution receives the result.
TEST_P(ReduceTable, DestinationsMayBeSources) {
  const auto& [table, dtype, op] = GetParam();
  for (const size_t count : {5, 100, 9001}) {
    const size_t bytes = count * size_of(dtype);
    for (const int sources : {1, 2, 3, 6}) {
      std::vector<Buffer> input;
      for (int s = 0; s < sources; ++s) {
        input.emplace_back(bytes, 0);
        random_.fill(dtype, Flavour::kOrdinary, input.back().data(), count);
      }
      std::vector<const void*> pointers;
      for (const Buffer& buffer : input) pointers.push_back(buffer.data());
      const Scale scale{1.0, op == ReduceOp::kAverage ? sources : 1};
      Buffer expected(bytes, 0);
      ReduceArgs args{.sources = pointers.data(),
                      .source_count = sources,
                      .destination = expected.data(),
                      .count = count,
                      .dtype = dtype,
                      .op = op,
                      .scale = scale};
      reference_.reduce(args);
      for (int home = 0; home < sources; ++home) {
        std::vector<Buffer> copies = input;
        for (int s = 0; s < sources; ++s) pointers[static_cast<size_t>(s)] = copies[static_cast<size_t>(s)].data();
        args.destination = copies[static_cast<size_t>(home)].data();
        args.second = sources > 1 ? copies[static_cast<size_t>((home + 1) % sources)].data() : nullptr;
        table->reduce(args);
        ASSERT_EQ(first_difference(dtype, expected.data(), args.destination, count), -1) << table->isa;
        if (args.second != nullptr) {
          ASSERT_EQ(std::memcmp(args.destination, args.second, bytes), 0) << table->isa;
        }
      }
    }
  }
}

// What makes a result independent of fusion: cutting a call anywhere changes nothing.
TEST_P(ReduceTable, CuttingACallChangesNothing) {
  const auto& [table, dtype, op] = GetParam();
  constexpr size_t kCount = 777;
  const size_t size = size_of(dtype);
  for (const Flavour flavour : kFlavours) {
    std::vector<Buffer> input(3, Buffer(kCount * size, 0));
    for (Buffer& buffer : input) random_.fill(dtype, flavour, buffer.data(), kCount);
    Buffer whole(kCount * size, 0);
    Buffer pieces(kCount * size, 0);
    std::vector<const void*> pointers(3);
    const auto reduce = [&](Buffer& to, size_t begin, size_t end) {
      for (size_t s = 0; s < 3; ++s) pointers[s] = input[s].data() + begin * size;
      table->reduce({.sources = pointers.data(),
                     .source_count = 3,
                     .destination = to.data() + begin * size,
                     .count = end - begin,
                     .dtype = dtype,
                     .op = op,
                     .scale = {1.0, op == ReduceOp::kAverage ? 3 : 1}});
    };
    reduce(whole, 0, kCount);
    for (size_t begin = 0; begin < kCount;) {
      const size_t end = std::min(kCount, begin + 1 + static_cast<size_t>(random_.below(150)));
      reduce(pieces, begin, end);
      begin = end;
    }
    ASSERT_EQ(first_difference(dtype, whole.data(), pieces.data(), kCount), -1) << table->isa;
  }
}

INSTANTIATE_TEST_SUITE_P(, ReduceTable, ::testing::ValuesIn(cases()), [](const auto& info) {
  return std::string(info.param.table->isa) + "_" + std::string(to_string(info.param.dtype)) + "_" +
         std::string(to_string(info.param.op));
});

}  // namespace
}  // namespace fusewire::testing
