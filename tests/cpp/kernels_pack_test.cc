// pack and unpack of views with any strides, against plain index arithmetic.
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "kernels_data.h"
#include "kernels_views.h"

namespace fusewire::testing {
namespace {

class Pack : public ::testing::TestWithParam<DataType> {
 protected:
  Random random_{31};
  const CpuKernels& reference_ = *available_cpu_kernels().front();

  TensorView random_view() { return testing::random_view(random_, GetParam()); }

  // Packs [begin, begin + count), compares with naive gathering and one cast, and brings it back into fresh memory.
  void check(TensorView view, int64_t begin, int64_t count, DataType wire, double factor) {
    const size_t size = size_of(view.dtype);
    const auto n = static_cast<size_t>(count);
    Buffer memory(static_cast<size_t>(extent(view)) * size, size * static_cast<size_t>(random_.below(3)));
    random_.fill(view.dtype, Flavour::kOrdinary, memory.data(), static_cast<size_t>(extent(view)));
    view.data = memory.data();

    std::vector<unsigned char> gathered(n * size);
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(gathered.data() + static_cast<size_t>(i) * size,
                  memory.data() + static_cast<size_t>(offset_of(view, begin + i)) * size, size);
    }
    Buffer expected(n * size_of(wire), 0);
    convert(view.dtype, gathered.data(), wire, expected.data(), n, factor);
    Buffer packed(n * size_of(wire), static_cast<size_t>(random_.below(64)));
    pack(view, begin, count, wire, factor, packed.data());
    ASSERT_EQ(first_difference(wire, expected.data(), packed.data(), n), -1) << describe(view, begin, count);
    ASSERT_TRUE(packed.guards_intact()) << describe(view, begin, count);

    Buffer restored(memory);
    std::memset(restored.data(), 0x5c, restored.size());
    Buffer wanted(restored);
    convert(wire, packed.data(), view.dtype, gathered.data(), n, 1.0);
    for (int64_t i = 0; i < count; ++i) {
      std::memcpy(wanted.data() + static_cast<size_t>(offset_of(view, begin + i)) * size,
                  gathered.data() + static_cast<size_t>(i) * size, size);
    }
    view.data = restored.data();
    unpack(packed.data(), wire, view, begin, count);
    ASSERT_EQ(std::memcmp(restored.data(), wanted.data(), wanted.size()), 0) << describe(view, begin, count);
    ASSERT_TRUE(restored.guards_intact()) << describe(view, begin, count);
  }

  void convert(DataType from, const void* source, DataType to, void* destination, size_t n, double factor) {
    if (from == to && factor == 1.0) {
      if (n > 0) std::memcpy(destination, source, n * size_of(from));
    } else {
      reference_.cast(from, source, to, destination, n, factor);
    }
  }

  static std::string describe(const TensorView& view, int64_t begin, int64_t count) {
    return to_string(view.dtype).data() + (" sizes " + to_string(view.sizes) + " strides " + to_string(view.strides)) +
           " begin " + std::to_string(begin) + " count " + std::to_string(count);
  }

  std::vector<DataType> wires() const {
    std::vector<DataType> all = {GetParam()};
    if (is_floating(GetParam())) {
      for (const DataType wire : kFloatingTypes) {
        if (size_of(wire) < size_of(GetParam())) all.push_back(wire);
      }
    }
    return all;
  }
};

TEST_P(Pack, RandomViewsAndRanges) {
  for (int round = 0; round < 80; ++round) {
    const TensorView view = random_view();
    for (const DataType wire : wires()) {
      const double factor = wire == view.dtype ? 1.0 : 1.0 / 3;
      const int64_t begin = random_.below(view.numel() + 1);
      ASSERT_NO_FATAL_FAILURE(check(view, 0, view.numel(), wire, factor));
      ASSERT_NO_FATAL_FAILURE(check(view, begin, random_.below(view.numel() - begin + 1), wire, factor));
      ASSERT_NO_FATAL_FAILURE(check(view, begin, view.numel() - begin, wire, 1.0));
    }
  }
}

TEST_P(Pack, LayoutsOfRealGradients) {
  const auto plain = [](size_t rank) { return std::vector<int64_t>(rank, 0); };
  const std::vector<TensorView> views = {
      laid_out(GetParam(), {300, 200}, {1, 0}, plain(2)),                // transposed
      laid_out(GetParam(), {8, 16, 5, 7}, {0, 2, 3, 1}, plain(4)),       // channels_last
      laid_out(GetParam(), {4, 3, 2, 5, 6}, {0, 2, 3, 4, 1}, plain(5)),  // channels_last_3d
      laid_out(GetParam(), {40, 50}, {0, 1}, {13, 0}),                   // columns cut off
      laid_out(GetParam(), {40, 3}, {0, 1}, {2, 0}),                     // narrow rows
      laid_out(GetParam(), {33, 34}, {0, 1}, {0, 1}),                    // every other column
      laid_out(GetParam(), {7, 8, 9}, {2, 1, 0}, plain(3)),              // reversed
      laid_out(GetParam(), {2, 2, 2, 2, 2, 2, 2, 2, 2, 2}, {9, 8, 7, 6, 5, 4, 3, 2, 1, 0}, plain(10)),
      laid_out(GetParam(), {}, {}, {}),
      laid_out(GetParam(), {1, 1, 1}, {2, 0, 1}, plain(3)),
  };
  for (const TensorView& view : views) {
    for (const DataType wire : wires()) {
      ASSERT_NO_FATAL_FAILURE(check(view, 0, view.numel(), wire, 1.0));
      for (int64_t begin = 0; begin < view.numel(); begin += 1 + view.numel() / 7) {
        ASSERT_NO_FATAL_FAILURE(check(view, begin, std::min<int64_t>(view.numel() - begin, 333), wire, 1.0));
      }
    }
  }
}

// An expanded gradient has stride 0: many logical elements, one in memory.
TEST_P(Pack, ExpandedViewsCanBeRead) {
  for (const Dims& strides : {Dims{0, 1}, Dims{1, 0}, Dims{0, 0}}) {
    TensorView view;
    view.dtype = GetParam();
    view.sizes = {70, 45};
    view.strides = strides;
    ASSERT_NO_FATAL_FAILURE(check(view, 0, view.numel(), view.dtype, 1.0));
    ASSERT_NO_FATAL_FAILURE(check(view, 101, 2000, view.dtype, 1.0));
  }
}

TEST_P(Pack, NothingToDoTouchesNothing) {
  TensorView view = contiguous_view(nullptr, GetParam(), {0, 5});
  pack(view, 0, 0, view.dtype, 1.0, nullptr);
  unpack(nullptr, view.dtype, view, 0, 0);
}

INSTANTIATE_TEST_SUITE_P(, Pack, ::testing::ValuesIn(all_types()),
                         [](const auto& info) { return std::string(to_string(info.param)); });

}  // namespace
}  // namespace fusewire::testing
