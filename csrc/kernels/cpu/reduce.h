// Reduction loops. All branches are taken before a loop starts; elements that do not fill a vector, and combinations
// too rare to deserve a loop, go to the reference.
//
// Note [When fp32 may be added in fp32]
// The contract says fp64 accumulators and one rounding. For a SINGLE addition or multiplication of two fp32 values the
// fp32 instruction gives the same bits: rounding to 53 and then to 24 bits is harmless since 53 >= 2 * 24 + 2, and sums
// in the subnormal range are exact. So two sources without a scale need no widening. Nor does their mean, (a + b) / 2:
// a sum below 2^-125 is exact in fp32, hence halving it rounds once; any other half is a normal number, where halving
// commutes with rounding. Only a + b itself may overflow: such groups (and any with a true inf or NaN) are done again
// in fp64. The same holds for no other factor.
#pragma once

#include "kernels/cpu/convert.h"
#include "kernels/cpu/copy.h"
#include "kernels/dispatch.h"
#include "kernels/reference.h"

namespace fusewire::element {
inline namespace FUSEWIRE_ISA {

enum class Scaling : uint8_t { kNone, kMultiply, kMultiplyDivide };

// What one loop is specialised for. W: the type it computes in. kSources: 0 means any number.
template <class T, class W, Combine kOp, int kSources, Scaling kScaling, bool kCheck>
struct Loop {
  static constexpr int kLanes = kLanesOf<W>;
  static constexpr int kUnroll = 4;
  using V = Vec<W, kLanes>;

  const ReduceArgs& args;
  const W factor;
  const W divisor;
  const char* fixed[kSources > 0 ? kSources : 1];

  explicit Loop(const ReduceArgs& a, double f, double d)
      : args(a), factor(static_cast<W>(f)), divisor(static_cast<W>(d)) {
    for (int s = 0; s < kSources; ++s) fixed[s] = static_cast<const char*>(a.sources[s]);
  }

  // Returns how far it got: whole vectors only.
  size_t run(size_t begin, size_t end) const {
    size_t i = begin;
    for (; i + kUnroll * kLanes <= end; i += kUnroll * kLanes) group<kUnroll>(i);
    for (; i + kLanes <= end; i += kLanes) group<1>(i);
    return i;
  }

  template <int kVectors>
  FUSEWIRE_ALWAYS_INLINE void group(size_t i) const {
    char* const to = static_cast<char*>(args.destination) + i * sizeof(T);
    V acc[kVectors];
    FUSEWIRE_UNROLL for (int u = 0; u < kVectors; ++u) acc[u] = read(0, i, u);
    const int sources = kSources > 0 ? kSources : args.source_count;
#pragma GCC unroll 4
    for (int s = 1; s < sources; ++s) {
      FUSEWIRE_UNROLL for (int u = 0; u < kVectors; ++u) acc[u] = combine_vectors<kOp>(acc[u], read(s, i, u));
    }
    FUSEWIRE_UNROLL for (int u = 0; u < kVectors; ++u) {
      if constexpr (kScaling != Scaling::kNone) acc[u] = acc[u] * factor;
      if constexpr (kScaling == Scaling::kMultiplyDivide) acc[u] = acc[u] / divisor;
    }
    if constexpr (kCheck) {
      V zero = finite_as_zero<W, kLanes>(acc[0]);
      FUSEWIRE_UNROLL for (int u = 1; u < kVectors; ++u) zero = zero + finite_as_zero<W, kLanes>(acc[u]);
      if (__builtin_expect(any_nan<W, kLanes>(zero), 0)) return again(i, i + kVectors * kLanes);
    }
    FUSEWIRE_UNROLL for (int u = 0; u < kVectors; ++u)
        narrow_to<W, T, kLanes>(to + u * kLanes * static_cast<int>(sizeof(T)), acc[u]);
  }

  void plainly(size_t begin, size_t end) const { reduce_plainly(args, begin, end); }

  FUSEWIRE_ALWAYS_INLINE V read(int s, size_t i, int u) const {
    const char* const from = kSources > 0 ? fixed[s] : static_cast<const char*>(args.sources[s]);
    return widen_from<W, T, kLanes>(from + (i + static_cast<size_t>(u * kLanes)) * sizeof(T));
  }

  // Elements whose result is not finite: element.h Note [Rescue] and, for fp32, the note above.
  __attribute__((noinline)) void again(size_t begin, size_t end) const {
    if constexpr (is_same<T, float> && is_same<W, float>) {
      Loop<float, double, kOp, kSources, kScaling, false>(args, static_cast<double>(factor), 1.0).run(begin, end);
    } else {
      reduce_plainly(args, begin, end);
    }
  }
};

// The second destination is filled from the first while that is in the innermost cache.
constexpr size_t kBlockBytes = 8192;

template <class T, class Args, class L>
inline void run_blocks(const Args& args, const L& loop) {
  const size_t block = args.second == nullptr ? args.count : kBlockBytes / sizeof(T);
  for (size_t begin = 0; begin < args.count; begin += block) {
    const size_t end = args.count - begin < block ? args.count : begin + block;
    const size_t done = loop.run(begin, end);
    if (done < end) loop.plainly(done, end);
    if (args.second != nullptr) {
      copy_bytes(static_cast<char*>(args.second) + begin * sizeof(T),
                 static_cast<const char*>(args.destination) + begin * sizeof(T), (end - begin) * sizeof(T));
    }
  }
}

template <class T, class W, Combine kOp, int kSources, Scaling kScaling, bool kCheck>
inline void run_loop(const ReduceArgs& args, double factor = 1.0, double divisor = 1.0) {
  using L = Loop<T, W, kOp, kSources, kScaling, kCheck>;
  run_blocks<T>(args, L(args, factor, divisor));
}

// ---- choosing the loop ----

template <class T, class W, Combine kOp, int kSources>
inline void reduce_scaled(const ReduceArgs& args) {
  // Rescue can matter only for Sum, and not where one addition is all there is.
  constexpr bool kCheck = kOp == Combine::kSum && Traits<T>::kRescue;
  double factor = args.scale.factor;
  int64_t divisor = args.scale.divisor;
  if (factor == 1.0 && (divisor & (divisor - 1)) == 0) {  // x / 2^k is x * 2^-k for every x
    factor = 1.0 / static_cast<double>(divisor);
    divisor = 1;
  }
  if (factor == 1.0 && divisor == 1) {
    run_loop<T, W, kOp, kSources, Scaling::kNone, kCheck && kSources != 2>(args);
  } else if (divisor == 1) {
    run_loop<T, W, kOp, kSources, Scaling::kMultiply, kCheck>(args, factor);
  } else {
    run_loop<T, W, kOp, kSources, Scaling::kMultiplyDivide, kCheck>(args, factor, static_cast<double>(divisor));
  }
}

template <class T, Combine kOp>
inline void reduce_floats(const ReduceArgs& args) {
  using Wide = typename Traits<T>::Wide;
  if (is_same<Wide, float> && !fits_float(args.scale.factor)) return kReferenceKernels.reduce(args);
  const bool unscaled = args.scale.factor == 1.0 && args.scale.divisor == 1;
  if constexpr (is_same<T, float>) {
    if (unscaled && args.source_count == 2) return run_loop<float, float, kOp, 2, Scaling::kNone, false>(args);
    if constexpr (kOp == Combine::kSum) {
      const double whole = args.scale.factor / static_cast<double>(args.scale.divisor);
      if (whole == 0.5 && (args.scale.factor == 1.0 || args.scale.divisor == 1) && args.source_count == 2) {
        return run_loop<float, float, kOp, 2, Scaling::kMultiply, true>(args, 0.5);
      }
    }
    // Comparing needs no wider type.
    if constexpr (kOp == Combine::kMin || kOp == Combine::kMax) {
      if (unscaled) return run_loop<float, float, kOp, 0, Scaling::kNone, false>(args);
    }
  }
  if constexpr (kOp == Combine::kSum) {
    if (args.source_count == 3) return reduce_scaled<T, Wide, kOp, 3>(args);
    if (args.source_count == 4) return reduce_scaled<T, Wide, kOp, 4>(args);
  }
  if (args.source_count == 2) return reduce_scaled<T, Wide, kOp, 2>(args);
  reduce_scaled<T, Wide, kOp, 0>(args);
}

// Unscaled integers never need more than their own width: sums and products are exact modulo it.
template <class T, Combine kOp>
inline void reduce_integers(const ReduceArgs& args) {
  if (args.scale.factor != 1.0 || args.scale.divisor != 1) return kReferenceKernels.reduce(args);
  if (args.source_count == 2) return run_loop<T, T, kOp, 2, Scaling::kNone, false>(args);
  run_loop<T, T, kOp, 0, Scaling::kNone, false>(args);
}

}  // namespace FUSEWIRE_ISA
}  // namespace fusewire::element
