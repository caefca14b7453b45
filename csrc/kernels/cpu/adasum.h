// Dot products and linear combinations; bit for bit what kernels/adasum.h says.
#pragma once

#include "kernels/adasum.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/reduce.h"
#include "kernels/dispatch.h"
#include "kernels/reference.h"

namespace fusewire::element {
inline namespace FUSEWIRE_ISA {

template <class T>
FUSEWIRE_ALWAYS_INLINE Vec<double, kLanesOf<double>> scaled_vector(const void* source, size_t index, double scale) {
  const auto x = widen_from<double, T, kLanesOf<double>>(static_cast<const char*>(source) + index * sizeof(T));
  if constexpr (is_same<T, double>) return x * scale;
  return x;
}

// All products of two sources beginning at `row` with two beginning at `column`; of one pair with itself if kTriangle,
// then without the product that would come twice. Tiles of two read each element half as often as single products.
template <class T, int kRows, int kColumns, bool kTriangle>
inline void dot_tile(const DotArgs& args, int row, int column) {
  constexpr int kLanes = kLanesOf<double>;
  constexpr int kParts = kDotLanes / kLanes;
  using V = Vec<double, kLanes>;
  const auto wanted = [](int r, int c) { return !kTriangle || r <= c; };
  V sums[kRows][kColumns][kParts] = {};
  size_t i = 0;
  for (; i + kDotLanes <= args.count; i += kDotLanes) {
    FUSEWIRE_UNROLL for (int part = 0; part < kParts; ++part) {
      const size_t at = i + static_cast<size_t>(part * kLanes);
      V left[kRows];
      V right[kColumns];
      FUSEWIRE_UNROLL for (int r = 0; r < kRows; ++r) {
        left[r] = scaled_vector<T>(args.sources[row + r], at, args.scales[row + r]);
      }
      FUSEWIRE_UNROLL for (int c = 0; c < kColumns; ++c) {
        right[c] = kTriangle ? left[c] : scaled_vector<T>(args.sources[column + c], at, args.scales[column + c]);
      }
      FUSEWIRE_UNROLL for (int r = 0; r < kRows; ++r) {
        FUSEWIRE_UNROLL for (int c = 0; c < kColumns; ++c) {
          if (wanted(r, c)) sums[r][c][part] = sums[r][c][part] + left[r] * right[c];
        }
      }
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int c = 0; c < kColumns; ++c) {
      if (!wanted(r, c)) continue;
      double lanes[kDotLanes];
      for (int part = 0; part < kParts; ++part) {
        store_vector(reinterpret_cast<char*>(lanes + part * kLanes), sums[r][c][part]);
      }
      add_products<T>(args.sources[row + r], args.scales[row + r], args.sources[column + c], args.scales[column + c], i,
                      args.count, lanes);
      args.dots[pair_index(args.source_count, row + r, column + c)] = fold_lanes(lanes);
    }
  }
}

template <class T>
inline void dot_products(const DotArgs& args) {
  const int n = args.source_count;
  for (int row = 0; row < n; row += 2) {
    if (row + 1 == n) {
      dot_tile<T, 1, 1, true>(args, row, row);
      return;
    }
    dot_tile<T, 2, 2, true>(args, row, row);
    for (int column = row + 2; column < n; column += 2) {
      if (column + 1 < n) {
        dot_tile<T, 2, 2, false>(args, row, column);
      } else {
        dot_tile<T, 2, 1, false>(args, row, column);
      }
    }
  }
}

// kSources: 0 means any number.
template <class T, int kSources>
struct Combination {
  static constexpr int kLanes = kLanesOf<double>;
  static constexpr int kUnroll = 4;
  using V = Vec<double, kLanes>;

  const CombineArgs& args;

  size_t run(size_t begin, size_t end) const {
    size_t i = begin;
    for (; i + kUnroll * kLanes <= end; i += kUnroll * kLanes) group<kUnroll>(i);
    for (; i + kLanes <= end; i += kLanes) group<1>(i);
    return i;
  }

  void plainly(size_t begin, size_t end) const { combine_plainly(args, begin, end); }

  template <int kVectors>
  FUSEWIRE_ALWAYS_INLINE void group(size_t i) const {
    const int sources = kSources > 0 ? kSources : args.source_count;
    V sum[kVectors];
    FUSEWIRE_UNROLL for (int u = 0; u < kVectors; ++u) sum[u] = term(0, i, u);
    for (int s = 1; s < sources; ++s) {
      FUSEWIRE_UNROLL for (int u = 0; u < kVectors; ++u) sum[u] = sum[u] + term(s, i, u);
    }
    char* const to = static_cast<char*>(args.destination) + i * sizeof(T);
    FUSEWIRE_UNROLL for (int u = 0; u < kVectors; ++u) {
      narrow_to<double, T, kLanes>(to + u * kLanes * static_cast<int>(sizeof(T)), sum[u] * args.factor);
    }
  }

  FUSEWIRE_ALWAYS_INLINE V term(int s, size_t i, int u) const {
    return scaled_vector<T>(args.sources[s], i + static_cast<size_t>(u * kLanes), args.scales[s]) *
           args.coefficients[s];
  }
};

template <class T>
inline void combine_sources(const CombineArgs& args) {
  if (args.source_count == 2) return run_blocks<T>(args, Combination<T, 2>{args});
  run_blocks<T>(args, Combination<T, 0>{args});
}

}  // namespace FUSEWIRE_ISA
}  // namespace fusewire::element
