// Views of every kind of layout, and plain index arithmetic on them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "common/types.h"
#include "kernels_data.h"

namespace fusewire::testing {

inline int64_t offset_of(const TensorView& view, int64_t index) {
  int64_t offset = 0;
  for (size_t i = view.sizes.size(); i-- > 0;) {
    offset += index % view.sizes[i] * view.strides[i];
    index /= view.sizes[i];
  }
  return offset;
}

inline int64_t extent(const TensorView& view) {
  int64_t last = 0;
  for (size_t i = 0; i < view.sizes.size(); ++i) last += (view.sizes[i] - 1) * view.strides[i];
  return last + 1;
}

// Dimensions laid out in `order` (innermost last), with gaps.
inline TensorView laid_out(DataType dtype, Dims sizes, const std::vector<size_t>& order,
                           const std::vector<int64_t>& gaps) {
  TensorView view;
  view.dtype = dtype;
  view.strides.resize(sizes.size());
  int64_t stride = 1;
  for (size_t i = order.size(); i-- > 0;) {
    stride *= i + 1 == order.size() ? gaps[i] + 1 : 1;
    view.strides[order[i]] = stride;
    stride *= sizes[order[i]];
    if (i + 1 != order.size()) stride += gaps[i];
  }
  view.sizes = std::move(sizes);
  return view;
}

inline TensorView random_view(Random& random, DataType dtype) {
  const size_t rank = static_cast<size_t>(random.below(6));
  Dims sizes(rank);
  for (auto& size : sizes) size = 1 + random.below(rank < 3 ? 90 : 9);
  std::vector<size_t> order(rank);
  std::iota(order.begin(), order.end(), 0);
  std::vector<int64_t> gaps(rank);
  for (size_t i = 0; i < rank; ++i) {
    std::swap(order[i], order[i + static_cast<size_t>(random.below(static_cast<int64_t>(rank - i)))]);
    gaps[i] = random.below(3) == 0 ? random.below(4) : 0;
  }
  return laid_out(dtype, sizes, order, gaps);
}

}  // namespace fusewire::testing
