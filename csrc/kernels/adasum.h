// The two loops of Adasum (collective/adasum.h says what they are for), element by element; shared by the reference and
// the vector tables as element.h is, and under the same rule (Note [One namespace per instruction set]).
#pragma once

#include "kernels/element.h"

namespace fusewire::element {
inline namespace FUSEWIRE_ISA {

// Note [Lanes of a dot product]
// Where a sum's order differs its bits differ. So every table adds as if it had kDotLanes lanes of doubles: element i
// of a call goes to lane i % kDotLanes, and at the end the upper half of the lanes is added to the lower half until one
// is left. No fused multiply-add: not every table has one.
constexpr int kDotLanes = 16;

FUSEWIRE_HD inline double fold_lanes(double* lanes) {
  for (int width = kDotLanes / 2; width > 0; width /= 2) {
    for (int lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

// One source's element; `scale` is a power of two. Only fp64 needs one: squares of all others fit a double.
template <class T>
FUSEWIRE_HD inline double scaled_element(const void* source, uint64_t index, double scale) {
  const double x = to_double(load<T>(source, index));
  if constexpr (is_same<T, double>) return x * scale;
  return x;
}

template <class T>
FUSEWIRE_HD inline void add_products(const void* left, double left_scale, const void* right, double right_scale,
                                     uint64_t begin, uint64_t end, double* lanes) {
  for (uint64_t i = begin; i < end; ++i) {
    lanes[i % kDotLanes] += scaled_element<T>(left, i, left_scale) * scaled_element<T>(right, i, right_scale);
  }
}

// Where the dot product of sources i <= j is in DotArgs::dots.
FUSEWIRE_HD inline int pair_index(int sources, int i, int j) { return i * sources - i * (i - 1) / 2 + (j - i); }

// The linear combination in fp64, sources in the order given, rounded once.
template <class T>
FUSEWIRE_HD inline T combine_element(const void* const* sources, const double* scales, const double* coefficients,
                                     int source_count, uint64_t index, double factor) {
  double sum = scaled_element<T>(sources[0], index, scales[0]) * coefficients[0];
  for (int s = 1; s < source_count; ++s) {
    sum = sum + scaled_element<T>(sources[s], index, scales[s]) * coefficients[s];
  }
  return Convert<T>::from(sum * factor);
}

}  // namespace FUSEWIRE_ISA
}  // namespace fusewire::element
