// pack and unpack on the stand-in: batches of views of every layout, alignment, size and type in one launch, bit for
// bit what element.h says.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "kernels/cuda_kernels.h"
#include "kernels/device_plan.h"
#include "kernels_data.h"
#include "kernels_views.h"
#include "simt/stand_in.h"

namespace fusewire::testing {
namespace {

struct Scale {
  double factor = 1.0;
  int64_t divisor = 1;
};

// One tensor of a batch, the part of it that moves, and its place in the buffer.
struct Item {
  TensorView view;
  std::unique_ptr<Buffer> memory;
  int64_t begin = 0;
  int64_t count = 0;
  uint64_t offset = 0;
};

class Batch {
 public:
  Batch(DataType dtype, DataType wire, Random& random) : dtype_(dtype), wire_(wire), random_(random) {}

  void add(TensorView view, Flavour flavour = Flavour::kOrdinary, bool part = false, bool align = true) {
    Item item;
    item.view = std::move(view);
    const auto elements = static_cast<size_t>(item.view.numel() == 0 ? 0 : extent(item.view));
    const size_t misalign = align ? 0 : size_of(dtype_) * static_cast<size_t>(random_.below(5));
    item.memory = std::make_unique<Buffer>(elements * size_of(dtype_), misalign);
    random_.fill(dtype_, flavour, item.memory->data(), elements);
    item.view.data = item.memory->data();
    item.count = item.view.numel();
    if (part) {
      item.begin = random_.below(item.count + 1);
      item.count = random_.below(item.count - item.begin + 1);
    }
    place(std::move(item), align);
  }

  void add_absent(int64_t count) {
    Item item;
    item.view = contiguous_view(nullptr, dtype_, {count});
    item.count = count;
    place(std::move(item), true);
  }

  uint64_t buffer_bytes() const { return end_; }
  std::vector<Item>& items() { return items_; }

  TransferPlan plan() const {
    TransferPlan plan(dtype_, wire_);
    for (const Item& item : items_) plan.add(item.view, item.begin, item.count, item.offset);
    return plan;
  }

  // Runs one direction in one launch, on a table that is as small as it says.
  void run(int (*kernel)(const TransferArgs&), void* buffer, Scale scale, uint64_t identity = 0) const {
    const TransferPlan made = plan();
    Buffer table(made.table_bytes(), 0);
    made.write(table.data());
    TransferArgs args = made.args(table.data());
    args.buffer = buffer;
    args.factor = scale.factor;
    args.divisor = scale.divisor;
    args.identity = identity;
    simt::seed(random_.bits());
    const uint64_t before = simt::launches();
    ASSERT_EQ(kernel(args), 0);
    ASSERT_EQ(simt::launches() - before, made.empty() ? 0u : 1u);
  }

  // Logical elements of an item, next to each other.
  std::vector<unsigned char> gathered(const Item& item, const unsigned char* memory) const {
    const size_t size = size_of(dtype_);
    std::vector<unsigned char> values(static_cast<size_t>(item.count) * size);
    for (int64_t i = 0; i < item.count; ++i) {
      std::memcpy(values.data() + static_cast<size_t>(i) * size,
                  memory + static_cast<size_t>(offset_of(item.view, item.begin + i)) * size, size);
    }
    return values;
  }

  void check_pack(double factor) {
    Buffer buffer(buffer_bytes(), 0);
    Buffer expected(buffer);
    run(kCudaKernels.pack, buffer.data(), {factor, 1}, 0x77);
    for (const Item& item : items_) {
      unsigned char* to = expected.data() + item.offset;
      const auto n = static_cast<size_t>(item.count);
      if (item.view.data == nullptr) {
        for (size_t i = 0; i < n; ++i) Random::write_integer(wire_, to, i, 0x77);
        continue;
      }
      const auto values = gathered(item, item.memory->data());
      convert(dtype_, values.data(), wire_, to, n, factor);
      ASSERT_TRUE(item.memory->guards_intact());
    }
    expect_same(wire_, expected, buffer);
  }

  void check_unpack(Scale scale, Flavour flavour) {
    Buffer buffer(buffer_bytes(), 0);
    for (const Item& item : items_) {
      random_.fill(wire_, flavour, buffer.data() + item.offset, static_cast<size_t>(item.count));
    }
    std::vector<std::unique_ptr<Buffer>> expected;
    for (Item& item : items_) {
      if (item.view.data == nullptr) continue;
      expected.push_back(std::make_unique<Buffer>(*item.memory));
      const size_t size = size_of(dtype_);
      std::vector<unsigned char> values(static_cast<size_t>(item.count) * size);
      scaled(buffer.data() + item.offset, values.data(), static_cast<size_t>(item.count), scale);
      for (int64_t i = 0; i < item.count; ++i) {
        std::memcpy(expected.back()->data() + static_cast<size_t>(offset_of(item.view, item.begin + i)) * size,
                    values.data() + static_cast<size_t>(i) * size, size);
      }
    }
    run(kCudaKernels.unpack, buffer.data(), scale);
    size_t at = 0;
    for (const Item& item : items_) {
      if (item.view.data == nullptr) continue;
      expect_same(dtype_, *expected[at++], *item.memory);
    }
  }

 private:
  void place(Item item, bool align) {
    const uint64_t step = align ? 16 : size_of(wire_);
    end_ = (end_ + step - 1) / step * step;
    if (!align) end_ += size_of(wire_) * static_cast<uint64_t>(random_.below(3));
    item.offset = end_;
    end_ += static_cast<uint64_t>(item.count) * size_of(wire_);
    items_.push_back(std::move(item));
  }

  static void convert(DataType from, const void* source, DataType to, void* destination, size_t n, double factor) {
    if (from == to && factor == 1.0) {
      if (n > 0) std::memcpy(destination, source, n * size_of(from));
    } else {
      const size_t parts = is_complex(from) ? 2 : 1;
      available_cpu_kernels().front()->cast(real_type(from), source, real_type(to), destination, n * parts, factor);
    }
  }

  // What the CPU's reduce makes of one source; where the buffer is narrower, the scale comes before the only rounding.
  void scaled(const void* from, void* to, size_t n, Scale scale) const {
    if (wire_ == dtype_) {
      available_cpu_kernels().front()->reduce({.sources = &from,
                                               .source_count = 1,
                                               .destination = to,
                                               .count = n,
                                               .dtype = dtype_,
                                               .op = ReduceOp::kSum,
                                               .scale = {scale.factor, scale.divisor}});
      return;
    }
    for (size_t i = 0; i < n; ++i) {
      const double x = read_floating(wire_, from, i);
      write_floating(dtype_, to, i, x * scale.factor / static_cast<double>(scale.divisor));
    }
  }

  static void expect_same(DataType dtype, const Buffer& expected, const Buffer& actual) {
    const size_t n = expected.size() / size_of(dtype);
    const int64_t at = first_difference(dtype, expected.data(), actual.data(), n);
    ASSERT_EQ(at, -1) << "element " << at << " of " << n << ": expected "
                      << hex(expected.data(), static_cast<size_t>(at), size_of(dtype)) << ", got "
                      << hex(actual.data(), static_cast<size_t>(at), size_of(dtype));
    ASSERT_TRUE(actual.guards_intact());
  }

  DataType dtype_;
  DataType wire_;
  Random& random_;
  std::vector<Item> items_;
  uint64_t end_ = 0;
};

std::vector<std::pair<DataType, DataType>> pairs() {
  std::vector<std::pair<DataType, DataType>> all;
  for (const DataType dtype : all_types()) {
    all.emplace_back(dtype, dtype);
    if (!is_floating(dtype)) continue;
    for (const DataType wire : kFloatingTypes) {
      if (size_of(wire) < size_of(dtype)) all.emplace_back(dtype, wire);
    }
  }
  return all;
}

class Transfers : public ::testing::TestWithParam<std::pair<DataType, DataType>> {
 protected:
  DataType dtype() const { return GetParam().first; }
  DataType wire() const { return GetParam().second; }
  bool floating() const { return is_floating(real_type(dtype())); }
  int64_t tile() const { return 8192 / static_cast<int64_t>(std::max(size_of(dtype()), size_of(wire()))); }

  std::vector<double> factors() const {
    if (!floating()) return {1.0};
    return {1.0, 0.25, 1.0 / 3, 3.0, 0x1p-70, static_cast<double>(0.1f)};
  }
  std::vector<Scale> scales() const {
    if (dtype() == DataType::kBool) return {{}};
    return {{}, {1.0, 4}, {1.0, 3}, {0.25, 1}, {1.0 / 3, 7}, {8.0, 5}, {1e300, 1}, {static_cast<double>(0.1f), 1}};
  }

  Random random_{2024};
};

TEST_P(Transfers, RandomBatches) {
  for (int round = 0; round < 12; ++round) {
    Batch batch(dtype(), wire(), random_);
    const bool align = round % 2 == 0;
    for (int64_t i = random_.below(30); i > 0; --i)
      batch.add(random_view(random_, dtype()), Flavour::kOrdinary, round % 3 == 1, align);
    const auto factor = factors();
    const auto scale = scales();
    ASSERT_NO_FATAL_FAILURE(batch.check_pack(factor[static_cast<size_t>(round) % factor.size()]));
    ASSERT_NO_FATAL_FAILURE(batch.check_unpack(scale[static_cast<size_t>(round) % scale.size()], Flavour::kOrdinary));
  }
}

TEST_P(Transfers, SizesAroundVectorsAndTiles) {
  Batch batch(dtype(), wire(), random_);
  for (const int64_t base : {int64_t{0}, int64_t{16}, int64_t{32}, tile() / 2, tile(), 2 * tile()}) {
    for (int64_t more = -3; more <= 3; ++more) {
      if (base + more >= 0)
        batch.add(contiguous_view(nullptr, dtype(), {base + more}), Flavour::kOrdinary, false, more != 2);
    }
  }
  ASSERT_NO_FATAL_FAILURE(batch.check_pack(1.0));
  ASSERT_NO_FATAL_FAILURE(batch.check_unpack({}, Flavour::kOrdinary));
}

TEST_P(Transfers, EveryBitPatternAndScale) {
  for (const Flavour flavour : kFlavours) {
    Batch batch(dtype(), wire(), random_);
    batch.add(contiguous_view(nullptr, dtype(), {1500}), flavour);
    batch.add(laid_out(dtype(), {30, 40}, {1, 0}, {0, 0}), flavour);
    for (const double factor : factors()) ASSERT_NO_FATAL_FAILURE(batch.check_pack(factor)) << "times " << factor;
    for (const Scale& scale : scales()) {
      ASSERT_NO_FATAL_FAILURE(batch.check_unpack(scale, flavour)) << "times " << scale.factor << " / " << scale.divisor;
    }
  }
}

TEST_P(Transfers, AbsentTensors) {
  Batch batch(dtype(), wire(), random_);
  batch.add_absent(5);
  batch.add(contiguous_view(nullptr, dtype(), {77}));
  batch.add_absent(tile() + 1);
  if (!is_complex(wire())) {
    ASSERT_NO_FATAL_FAILURE(batch.check_pack(1.0));
  }
  ASSERT_NO_FATAL_FAILURE(batch.check_unpack({}, Flavour::kOrdinary));
}

TEST_P(Transfers, NothingAtAll) {
  Batch batch(dtype(), wire(), random_);
  ASSERT_NO_FATAL_FAILURE(batch.check_pack(1.0));
  batch.add(contiguous_view(nullptr, dtype(), {0, 4}));
  ASSERT_NO_FATAL_FAILURE(batch.check_pack(1.0));
  ASSERT_NO_FATAL_FAILURE(batch.check_unpack({}, Flavour::kOrdinary));
}

TEST_P(Transfers, ManyDimensionsThatDoNotMerge) {
  Batch batch(dtype(), wire(), random_);
  batch.add(laid_out(dtype(), Dims(11, 2), {10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0}, std::vector<int64_t>(11, 0)));
  batch.add(laid_out(dtype(), Dims(10, 2), {9, 8, 7, 6, 5, 4, 3, 2, 1, 0}, std::vector<int64_t>(10, 0)),
            Flavour::kOrdinary, true);
  ASSERT_NO_FATAL_FAILURE(batch.check_pack(1.0));
  ASSERT_NO_FATAL_FAILURE(batch.check_unpack({}, Flavour::kOrdinary));
}

INSTANTIATE_TEST_SUITE_P(, Transfers, ::testing::ValuesIn(pairs()), [](const auto& info) {
  return std::string(to_string(info.param.first)) + "_as_" + std::string(to_string(info.param.second));
});

// More tensors than the search takes in one, two or three steps.
TEST(TransferSearch, ThousandsOfTensorsInOneLaunch) {
  Random random(5);
  for (const int count : {31, 32, 33, 1023, 1024, 1025, 4000}) {
    Batch batch(DataType::kFloat32, DataType::kFloat32, random);
    for (int i = 0; i < count; ++i)
      batch.add(contiguous_view(nullptr, DataType::kFloat32, {i % 5 == 3 ? 0 : 1 + i % 9}));
    ASSERT_NO_FATAL_FAILURE(batch.check_pack(1.0)) << count;
  }
}

TEST(TransferPlan, TensorsPastTwoToThe31AreCut) {
  TransferPlan plan(DataType::kFloat32, DataType::kFloat16);
  constexpr int64_t kRows = int64_t{1} << 17;
  TensorView view;
  view.data = reinterpret_cast<void*>(uintptr_t{0x1000});  // never followed
  view.sizes = {kRows, 40000};
  view.strides = {1, kRows};  // a transpose of 5.2 * 10^9 elements
  plan.add(view, 12345, view.numel() - 20000, 32);
  std::vector<uint32_t> table(plan.table_bytes() / 4 + 4);
  plan.write(table.data());
  const auto* bytes = reinterpret_cast<const unsigned char*>(table.data());
  const auto* pieces = reinterpret_cast<const cuda::Piece*>(bytes + cuda::pieces_offset(plan.pieces()));
  const auto* layouts = reinterpret_cast<const cuda::Layout*>(bytes + cuda::layouts_offset(plan.pieces()));
  ASSERT_GT(plan.pieces(), 4u);
  int64_t next = 12345;
  for (uint32_t p = 0; p < plan.pieces(); ++p) {
    const cuda::Piece& piece = pieces[p];
    ASSERT_LT(piece.begin + piece.count, uint64_t{1} << 31);
    ASSERT_EQ(piece.buffer, 32 + static_cast<uint64_t>(next - 12345) * 2);
    const cuda::Layout& layout = layouts[piece.layout - 1];
    ASSERT_EQ(layout.dims, 2);
    const int64_t row = piece.begin / layout.sizes[1].divisor;
    const int64_t column = piece.begin % layout.sizes[1].divisor;
    const int64_t at = row * layout.strides[0] + column * layout.strides[1];
    ASSERT_EQ(piece.tensor + static_cast<uint64_t>(at) * 4, 0x1000 + static_cast<uint64_t>(offset_of(view, next)) * 4);
    next += static_cast<int64_t>(piece.count);
  }
  ASSERT_EQ(next, 12345 + view.numel() - 20000);
}

TEST(TransferPlan, LongRunsAreCut) {
  TransferPlan plan(DataType::kUInt8, DataType::kUInt8);
  TensorView view =
      contiguous_view(reinterpret_cast<void*>(uintptr_t{0x1000}), DataType::kUInt8, {(int64_t{5} << 30) + 3});
  plan.add(view, 1, view.numel() - 1, 0);
  EXPECT_EQ(plan.pieces(), 6u);
  EXPECT_EQ(plan.tiles(), 5u * ((1u << 30) / 8192) + 1);
}

TEST(TransferPlan, DivisionByMultiplying) {
  Random random(8);
  for (int round = 0; round < 2000; ++round) {
    TransferPlan plan(DataType::kUInt8, DataType::kUInt8);
    const int64_t size = round < 50 ? 2 + round : 2 + random.below(int64_t{1} << random.below(30));
    TensorView view = contiguous_view(reinterpret_cast<void*>(uintptr_t{1}), DataType::kUInt8, {1, size});
    view.sizes = {1, size};
    view.strides = {0, 2};
    plan.add(view, 0, size, 0);
    std::vector<uint64_t> table(plan.table_bytes() / 8 + 1);
    plan.write(table.data());
    const auto* layout = reinterpret_cast<const cuda::Layout*>(reinterpret_cast<const unsigned char*>(table.data()) +
                                                               cuda::layouts_offset(1));
    const cuda::Divider& by = layout->sizes[0];
    for (const int64_t n : {random.below(int64_t{1} << 31), size - 1, size, (int64_t{1} << 31) - 1}) {
      const uint32_t m = static_cast<uint32_t>(n);
      ASSERT_EQ((__umulhi(m, by.multiplier) + m) >> by.shift, m / by.divisor) << m << " / " << by.divisor;
    }
  }
}

TEST(TransferArgs, WhatNoKernelServesIsAnError) {
  TransferArgs args;
  args.tiles = 1;
  args.dtype = DataType::kFloat16;
  args.wire = DataType::kFloat32;  // wider
  EXPECT_NE(kCudaKernels.pack(args), 0);
  EXPECT_NE(kCudaKernels.unpack(args), 0);
  args.dtype = args.wire = DataType::kInt32;
  args.factor = 2;  // integers are scaled once, on their way back
  EXPECT_NE(kCudaKernels.pack(args), 0);
}

}  // namespace
}  // namespace fusewire::testing
