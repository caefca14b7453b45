// Vectors of one register, in the compiler's portable vector types: the same text becomes SSE2, AVX2, AVX-512 or NEON
// by the flags it is compiled with. Intrinsics appear only where no portable expression reaches the instruction.
#pragma once

#ifdef __SSE2__
#include <immintrin.h>
#endif
#include <stddef.h>

#include "kernels/element.h"

#define FUSEWIRE_ALWAYS_INLINE inline __attribute__((always_inline))
#define FUSEWIRE_UNROLL _Pragma("GCC unroll 8")

namespace fusewire::element {
inline namespace FUSEWIRE_ISA {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

template <class T, int kLanes>
struct VectorOf {
  typedef T Type __attribute__((vector_size(kLanes * sizeof(T))));
};
template <class T, int kLanes>
using Vec = typename VectorOf<T, kLanes>::Type;

template <class T>
constexpr int kLanesOf = kVectorBytes / static_cast<int>(sizeof(T));

template <class V>
FUSEWIRE_ALWAYS_INLINE V load_vector(const char* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(V));
  return v;
}
template <class V>
FUSEWIRE_ALWAYS_INLINE void store_vector(char* to, V v) {
  __builtin_memcpy(to, &v, sizeof(V));
}

// Whether any lane is inf or NaN: x - x is 0 for finite x only.
template <class W, int kLanes>
FUSEWIRE_ALWAYS_INLINE Vec<W, kLanes> finite_as_zero(Vec<W, kLanes> x) {
  return x - x;
}
template <class W, int kLanes>
FUSEWIRE_ALWAYS_INLINE bool any_nan(Vec<W, kLanes> x) {
#if defined(__AVX512F__)
  if constexpr (is_same<W, double>) return _mm512_cmp_pd_mask(bits_as<__m512d>(x), bits_as<__m512d>(x), _CMP_UNORD_Q);
  if constexpr (is_same<W, float>) return _mm512_cmp_ps_mask(bits_as<__m512>(x), bits_as<__m512>(x), _CMP_UNORD_Q);
#elif defined(__AVX2__)
  return _mm256_movemask_epi8(bits_as<__m256i>(x != x)) != 0;
#elif defined(__SSE2__)
  return _mm_movemask_epi8(bits_as<__m128i>(x != x)) != 0;
#else
  const auto halves = bits_as<Vec<uint64_t, 2> >(x != x);
  return (halves[0] | halves[1]) != 0;
#endif
}

template <Combine kOp, class V>
FUSEWIRE_ALWAYS_INLINE V combine_vectors(V acc, V x) {
  if constexpr (kOp == Combine::kSum) return acc + x;
  if constexpr (kOp == Combine::kProduct) return acc * x;
  if constexpr (kOp == Combine::kMin) return (x < acc) | (x != x) ? x : acc;
  if constexpr (kOp == Combine::kMax) return (x > acc) | (x != x) ? x : acc;
}

}  // namespace FUSEWIRE_ISA
}  // namespace fusewire::element
