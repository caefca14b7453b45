// Casting loops between the floating types.
#pragma once

#include "kernels/cpu/convert.h"
#include "kernels/reference.h"

namespace fusewire::element {
inline namespace FUSEWIRE_ISA {

template <class From, class To, class W, bool kScale>
inline void cast_loop(DataType from, const char* source, DataType to, char* destination, size_t count, double factor) {
  constexpr size_t kLanes = kLanesOf<W>;
  constexpr size_t kUnroll = 2;
  size_t i = 0;
  const auto step = [&](size_t at) __attribute__((always_inline)) {
    auto v = widen_from<W, From, kLanes>(source + at * sizeof(From));
    if constexpr (kScale) v = v * static_cast<W>(factor);
    narrow_to<W, To, kLanes>(destination + at * sizeof(To), v);
  };
  for (; i + kUnroll * kLanes <= count; i += kUnroll * kLanes) {
    FUSEWIRE_UNROLL for (size_t u = 0; u < kUnroll; ++u) step(i + u * kLanes);
  }
  for (; i + kLanes <= count; i += kLanes) step(i);
  if (i < count) {
    kReferenceKernels.cast(from, source + i * sizeof(From), to, destination + i * sizeof(To), count - i, factor);
  }
}

// A product is computed in fp64; a pure conversion in fp32 unless one side is fp64.
template <class From, class To>
inline void cast_values(DataType from, const char* source, DataType to, char* destination, size_t count,
                        double factor) {
  using Plain = Conditional<is_same<From, double> || is_same<To, double>, double, float>;
  if (factor == 1.0) {
    cast_loop<From, To, Plain, false>(from, source, to, destination, count, factor);
  } else {
    cast_loop<From, To, double, true>(from, source, to, destination, count, factor);
  }
}

}  // namespace FUSEWIRE_ISA
}  // namespace fusewire::element
