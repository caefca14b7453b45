// The arithmetic of one element: widen, combine, scale, narrow. Everything that computes (the reference, the vector
// tables' tails and rare cases, CUDA kernels) takes it from here, so there is one definition of every number.
//
// Plain C++17, integers and floats only: this header is also compiled by nvcc and once per instruction set.
//
// Note [One namespace per instruction set]
// A file compiled for AVX-512 must not define any symbol that a file compiled for plain x86-64 may be linked to: the
// linker keeps one copy of an inline function and the program would die on an older CPU. So everything here lives in an
// inline namespace named by FUSEWIRE_ISA, which each vector file defines before it includes this header, and those
// files use no function or template of the standard library.
#pragma once

#include <math.h>
#include <stdint.h>

#ifdef __CUDACC__
#define FUSEWIRE_HD __host__ __device__
#else
#define FUSEWIRE_HD
#endif
#ifndef FUSEWIRE_ISA
#define FUSEWIRE_ISA portable
#endif

namespace fusewire::element {
inline namespace FUSEWIRE_ISA {

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
struct Bool {
  uint8_t bits;  // 0 or 1; any other byte is read as true
};

enum class Combine : uint8_t { kSum, kMin, kMax, kProduct };

template <class A, class B>
constexpr bool is_same = false;
template <class A>
constexpr bool is_same<A, A> = true;

template <bool kFirst, class A, class B>
struct Choose {
  using Type = A;
};
template <class A, class B>
struct Choose<false, A, B> {
  using Type = B;
};
template <bool kFirst, class A, class B>
using Conditional = typename Choose<kFirst, A, B>::Type;

template <class T>
using Unsigned = Conditional<sizeof(T) == 1, uint8_t,
                             Conditional<sizeof(T) == 2, uint16_t, Conditional<sizeof(T) == 4, uint32_t, uint64_t>>>;

template <class To, class From>
FUSEWIRE_HD inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "a reinterpretation keeps the size");
  To to;
  __builtin_memcpy(&to, &from, sizeof(to));
  return to;
}

// Memory is read and written bytewise: a slice of a slot may start anywhere.
template <class T>
FUSEWIRE_HD inline T load(const void* base, uint64_t index) {
  T value;
  __builtin_memcpy(&value, static_cast<const char*>(base) + index * sizeof(T), sizeof(T));
  return value;
}
template <class T>
FUSEWIRE_HD inline void store(void* base, uint64_t index, T value) {
  __builtin_memcpy(static_cast<char*>(base) + index * sizeof(T), &value, sizeof(T));
}

FUSEWIRE_HD inline bool is_finite(float x) { return (bits_as<uint32_t>(x) & 0x7f800000u) != 0x7f800000u; }
FUSEWIRE_HD inline bool is_finite(double x) {
  return (bits_as<uint64_t>(x) & 0x7ff0000000000000u) != 0x7ff0000000000000u;
}

// ---- conversions; all round to nearest, ties to even, and a NaN stays a NaN ----

FUSEWIRE_HD inline float to_float(BFloat16 x) { return bits_as<float>(static_cast<uint32_t>(x.bits) << 16); }

FUSEWIRE_HD inline float to_float(Half x) {
#ifdef __CUDA_ARCH__  // one instruction, same bits
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(x.bits));
  return value;
#else
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return bits_as<float>(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude >= 0x0400u) return bits_as<float>(sign | ((magnitude << 13) + 0x38000000u));
  const float value = static_cast<float>(magnitude) * 0x1p-24f;  // subnormal: exact
  return bits_as<float>(sign | bits_as<uint32_t>(value));
#endif
}

FUSEWIRE_HD inline BFloat16 to_bfloat16(float x) {
#ifdef __CUDA_ARCH__  // one instruction, same bits but for the payload of a NaN
  BFloat16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
  return result;
#else
  const uint32_t bits = bits_as<uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>(bits >> 16 | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16)};
#endif
}

FUSEWIRE_HD inline Half to_half(float x) {
#ifdef __CUDA_ARCH__
  Half half;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half.bits) : "f"(x));
  return half;
#else
  const uint32_t bits = bits_as<uint32_t>(x);
  const uint32_t sign = bits >> 16 & 0x8000u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t result;
  if (magnitude > 0x7f800000u) {
    result = 0x7e00u | (magnitude >> 13 & 0x3ffu);
  } else if (magnitude >= 0x477ff000u) {  // 65520: half way between the largest half and 2^16
    result = 0x7c00u;
  } else if (magnitude >= 0x38800000u) {  // 2^-14: the smallest normal half
    result = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  } else {
    // Adding 0.5 puts the unit of a subnormal half, 2^-24, into the last bit of a float: the addition rounds.
    result = bits_as<uint32_t>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000u;
  }
  return {static_cast<uint16_t>(sign | result)};
#endif
}

// Note [Round to odd]
// Rounding a double to float and then to a half-width type can be wrong by rounding twice. Cutting the double off to
// float and setting the last bit if anything was lost keeps enough (24 bits >= 11 + 2) for the second rounding to see
// on which side of a tie it is.
FUSEWIRE_HD inline float to_odd_float(double x) {
  const float nearest = static_cast<float>(x);
  const double back = static_cast<double>(nearest);
  uint32_t bits = bits_as<uint32_t>(nearest);
  if (back != x && back == back) {
    const double size = x < 0 ? -x : x;
    const double back_size = back < 0 ? -back : back;
    bits = (back_size > size ? bits - 1 : bits) | 1u;
  }
  return bits_as<float>(bits);
}

template <class To>
struct Convert;
template <>
struct Convert<Half> {
  FUSEWIRE_HD static Half from(float x) { return to_half(x); }
  FUSEWIRE_HD static Half from(double x) { return to_half(to_odd_float(x)); }
};
template <>
struct Convert<BFloat16> {
  FUSEWIRE_HD static BFloat16 from(float x) { return to_bfloat16(x); }
  FUSEWIRE_HD static BFloat16 from(double x) { return to_bfloat16(to_odd_float(x)); }
};
template <>
struct Convert<float> {
  FUSEWIRE_HD static float from(float x) { return x; }
  FUSEWIRE_HD static float from(double x) { return static_cast<float>(x); }
};
template <>
struct Convert<double> {
  FUSEWIRE_HD static double from(float x) { return static_cast<double>(x); }
  FUSEWIRE_HD static double from(double x) { return x; }
};

FUSEWIRE_HD inline double to_double(Half x) { return static_cast<double>(to_float(x)); }
FUSEWIRE_HD inline double to_double(BFloat16 x) { return static_cast<double>(to_float(x)); }
FUSEWIRE_HD inline double to_double(float x) { return static_cast<double>(x); }
FUSEWIRE_HD inline double to_double(double x) { return x; }

// The integer part of x modulo 2^64; 0 for inf and NaN. Defined for every x, where a C++ cast is not.
FUSEWIRE_HD inline uint64_t truncate(double x) {
  if (x > -0x1p63 && x < 0x1p63) return static_cast<uint64_t>(static_cast<int64_t>(x));
  const uint64_t bits = bits_as<uint64_t>(x);
  const int exponent = static_cast<int>(bits >> 52 & 0x7ffu) - 1075;  // x = mantissa * 2^exponent, exponent >= 11
  if (exponent >= 64) return 0;
  const uint64_t magnitude = ((bits & 0xfffffffffffffu) | 0x10000000000000u) << exponent;
  return bits >> 63 ? 0 - magnitude : magnitude;
}

// ---- the accumulator of each type ----

template <class T, bool kSigned = (static_cast<T>(-1) < static_cast<T>(0))>
struct IntegerTraits {
  using Wide = uint64_t;
};
template <class T>
struct IntegerTraits<T, true> {
  using Wide = int64_t;
};

template <class T>
struct Traits : IntegerTraits<T> {
  static constexpr bool kFloating = false;
  FUSEWIRE_HD static typename IntegerTraits<T>::Wide widen(T x) { return x; }
};

template <class T, class W>
struct FloatTraits {
  using Wide = W;
  static constexpr bool kFloating = true;
  FUSEWIRE_HD static T narrow(W x) { return Convert<T>::from(x); }
};
template <>
struct Traits<Half> : FloatTraits<Half, float> {
  static constexpr bool kRescue = false;
  FUSEWIRE_HD static float widen(Half x) { return to_float(x); }
};
template <>
struct Traits<BFloat16> : FloatTraits<BFloat16, float> {
  static constexpr bool kRescue = true;
  FUSEWIRE_HD static float widen(BFloat16 x) { return to_float(x); }
};
template <>
struct Traits<float> : FloatTraits<float, double> {
  static constexpr bool kRescue = false;
  FUSEWIRE_HD static double widen(float x) { return static_cast<double>(x); }
};
template <>
struct Traits<double> : FloatTraits<double, double> {
  static constexpr bool kRescue = true;
  FUSEWIRE_HD static double widen(double x) { return x; }
};
template <>
struct Traits<Bool> {
  using Wide = uint8_t;
  static constexpr bool kFloating = false;
  FUSEWIRE_HD static uint8_t widen(Bool x) { return x.bits != 0; }
};

// ---- combining ----

// One step of a reduction, in rank order. A NaN on either side of Min and Max wins; of equal values (zeros of either
// sign) the earlier one stays.
template <Combine kOp, class W>
FUSEWIRE_HD inline W combine(W acc, W x) {
  if constexpr (kOp == Combine::kMin) return x < acc || x != x ? x : acc;
  if constexpr (kOp == Combine::kMax) return x > acc || x != x ? x : acc;
  if constexpr (static_cast<W>(0.5) != static_cast<W>(0)) {
    return kOp == Combine::kSum ? acc + x : acc * x;
  } else {  // integers wrap around
    const uint64_t a = static_cast<uint64_t>(acc);
    const uint64_t b = static_cast<uint64_t>(x);
    return static_cast<W>(kOp == Combine::kSum ? a + b : a * b);
  }
}

// ---- scaling: acc * factor / divisor, rounded once ----

template <class W>
FUSEWIRE_HD inline W scale_floating(W acc, W factor, W divisor) {
  return acc * factor / divisor;  // by 1: exact, so the vector loops leave such a step out
}

template <class T>
FUSEWIRE_HD inline T scale_integer(typename Traits<T>::Wide acc, double factor, int64_t divisor) {
  using Wide = typename Traits<T>::Wide;
  if (factor == 1.0) return static_cast<T>(acc / static_cast<Wide>(divisor));
  return static_cast<T>(truncate(static_cast<double>(acc) * factor / static_cast<double>(divisor)));
}

// Note [Rescue]
// A sum of fp64 (or bf16, whose range is that of its fp32 accumulator) values can overflow although the scaled result
// is representable, and an overflow can meet an inf of the other sign and become NaN. So where the plain result is not
// finite, the element alone is computed again: terms 2^-32 of their size, exponents of the sum and of the factor kept
// apart until the end, and rounding errors carried along, so that the mean of several largest values is the largest
// value and not inf. It depends on nothing but the element's sources: chunking and vector width do not show.
// x = result * 2^exponent with 0.5 <= |result| < 1; zero, inf and NaN keep exponent 0.
FUSEWIRE_HD inline double split(double x, int* exponent) {
  *exponent = 0;
  if (x == 0 || !is_finite(x)) return x;
  if ((bits_as<uint64_t>(x) & 0x7ff0000000000000u) == 0) {  // subnormal
    x *= 0x1p64;
    *exponent = -64;
  }
  const uint64_t bits = bits_as<uint64_t>(x);
  *exponent += static_cast<int>(bits >> 52 & 0x7ffu) - 1022;
  return bits_as<double>((bits & 0x800fffffffffffffu) | 0x3fe0000000000000u);
}

// x * 2^exponent in steps that neither overflow nor underflow before the last, for any |x| < 1 and for any x if the
// exponent is negative.
FUSEWIRE_HD inline double join(double x, int exponent) {
  while (exponent > 1000) {
    x *= 0x1p1000;
    exponent -= 1000;
  }
  while (exponent < -1000) {
    x *= 0x1p-1000;
    exponent += 1000;
  }
  return x * bits_as<double>(static_cast<uint64_t>(exponent + 1023) << 52);
}

template <class T, class Read>
FUSEWIRE_HD inline T rescued_sum(const Read& read, int source_count, double factor, int64_t divisor) {
  double sum = 0;
  double lost = 0;  // what the additions rounded away
  for (int s = 0; s < source_count; ++s) {
    const double x = to_double(read(s)) * 0x1p-32;
    const double next = sum + x;
    const double part = next - sum;
    lost += (sum - (next - part)) + (x - part);
    sum = next;
  }
  if (!is_finite(sum)) return Convert<T>::from(sum * factor / static_cast<double>(divisor));  // a true inf or NaN
  const double total = sum + lost;
  lost -= total - sum;
  int exponent;
  int factor_exponent;
  const double high = split(total, &exponent);
  const double low = lost == 0 ? 0 : join(lost, -exponent);
  const double scale = split(factor, &factor_exponent);
  const double product = high * scale;
  const double product_low = fma(high, scale, -product) + low * scale;
  const double d = static_cast<double>(divisor);
  const double quotient = product / d;
  const double rest = fma(-quotient, d, product) + product_low;
  return Convert<T>::from(join(quotient + rest / d, exponent + factor_exponent + 32));
}

// ---- one element of a whole reduction; `read(s)` is the element of source s ----

template <class T>
struct ReadAt {
  const void* const* sources;
  uint64_t index;
  FUSEWIRE_HD T operator()(int source) const { return load<T>(sources[source], index); }
};

// `Wide` is Traits<T>::Wide, or double where a half type's factor does not fit a float.
template <class T, Combine kOp, class Wide, class Read>
FUSEWIRE_HD inline T reduce_floating(const Read& read, int source_count, double factor, int64_t divisor) {
  Wide acc = static_cast<Wide>(Traits<T>::widen(read(0)));
  for (int s = 1; s < source_count; ++s) acc = combine<kOp>(acc, static_cast<Wide>(Traits<T>::widen(read(s))));
  acc = scale_floating(acc, static_cast<Wide>(factor), static_cast<Wide>(divisor));
  if constexpr (kOp == Combine::kSum && Traits<T>::kRescue) {
    if (!is_finite(acc)) {
      return rescued_sum<T>(read, source_count, factor, divisor);
    }
  }
  return Convert<T>::from(acc);
}

template <class T, Combine kOp, class Read>
FUSEWIRE_HD inline T reduce_integer(const Read& read, int source_count, double factor, int64_t divisor) {
  typename Traits<T>::Wide acc = Traits<T>::widen(read(0));
  for (int s = 1; s < source_count; ++s) acc = combine<kOp>(acc, Traits<T>::widen(read(s)));
  return scale_integer<T>(acc, factor, divisor);
}

// Min and Product are `and`, Max and Sum are `or`; a scale has no meaning for bool and is ignored.
template <Combine kOp, class Read>
FUSEWIRE_HD inline Bool reduce_bool(const Read& read, int source_count) {
  uint8_t acc = Traits<Bool>::widen(read(0));
  for (int s = 1; s < source_count; ++s) {
    const uint8_t x = Traits<Bool>::widen(read(s));
    acc = kOp == Combine::kMin || kOp == Combine::kProduct ? acc & x : acc | x;
  }
  return {acc};
}

// Whether a factor can be applied in fp32 without overflow or loss of its digits.
FUSEWIRE_HD inline bool fits_float(double factor) {
  const double size = factor < 0 ? -factor : factor;
  return size == 0 || (size >= 0x1p-126 && size <= 0x1.fffffep127);
}

// Any type and operator; the branch on the factor is the same for all elements of a call.
template <class T, Combine kOp, class Read>
FUSEWIRE_HD inline T reduce_element(const Read& read, int source_count, double factor, int64_t divisor) {
  if constexpr (Traits<T>::kFloating) {
    using Wide = typename Traits<T>::Wide;
    if (sizeof(Wide) == sizeof(float) && !fits_float(factor)) {
      return reduce_floating<T, kOp, double>(read, source_count, factor, divisor);
    }
    return reduce_floating<T, kOp, Wide>(read, source_count, factor, divisor);
  } else if constexpr (sizeof(typename Traits<T>::Wide) == 1) {
    return reduce_bool<kOp>(read, source_count);
  } else {
    return reduce_integer<T, kOp>(read, source_count, factor, divisor);
  }
}

// ---- casts ----

// source * factor, computed in double and rounded once.
template <class From, class To>
FUSEWIRE_HD inline To cast_element(From x, double factor) {
  if (factor == 1.0) return Convert<To>::from(Traits<From>::widen(x));  // the product would be exact: same bits
  return Convert<To>::from(to_double(x) * factor);
}

}  // namespace FUSEWIRE_ISA
}  // namespace fusewire::element
