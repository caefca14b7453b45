// Conversions between lane types. GCC's __builtin_convertvector splits vectors of 64 bytes in halves and goes through
// memory for those of 8, so the ones that matter are spelled out where an instruction exists.
#pragma once

#include "kernels/cpu/vector.h"

namespace fusewire::element {
inline namespace FUSEWIRE_ISA {

#ifdef __SSE2__
template <class V>
FUSEWIRE_ALWAYS_INLINE __m128i from_eight_bytes(V v) {
  static_assert(sizeof(V) == 8, "half a register");
  return _mm_cvtsi64_si128(bits_as<long long>(v));
}
template <class V>
FUSEWIRE_ALWAYS_INLINE V to_eight_bytes(__m128i v) {
  return bits_as<V>(static_cast<long long>(_mm_cvtsi128_si64(v)));
}
#endif

template <int kLanes>
FUSEWIRE_ALWAYS_INLINE Vec<double, kLanes> to_doubles(Vec<float, kLanes> x) {
#ifdef __AVX512F__
  if constexpr (kLanes == 8) return bits_as<Vec<double, 8>>(_mm512_cvtps_pd(bits_as<__m256>(x)));
#endif
#ifdef __AVX2__
  if constexpr (kLanes == 4) return bits_as<Vec<double, 4>>(_mm256_cvtps_pd(bits_as<__m128>(x)));
#endif
#ifdef __SSE2__
  if constexpr (kLanes == 2) return bits_as<Vec<double, 2>>(_mm_cvtps_pd(_mm_castsi128_ps(from_eight_bytes(x))));
#endif
  return __builtin_convertvector(x, Vec<double, kLanes>);
}

template <int kLanes>
FUSEWIRE_ALWAYS_INLINE Vec<float, kLanes> to_floats(Vec<double, kLanes> x) {
#ifdef __AVX512F__
  if constexpr (kLanes == 8) return bits_as<Vec<float, 8>>(_mm512_cvtpd_ps(bits_as<__m512d>(x)));
#endif
#ifdef __AVX2__
  if constexpr (kLanes == 4) return bits_as<Vec<float, 4>>(_mm256_cvtpd_ps(bits_as<__m256d>(x)));
#endif
#ifdef __SSE2__
  if constexpr (kLanes == 2) {
    return to_eight_bytes<Vec<float, 2>>(_mm_castps_si128(_mm_cvtpd_ps(bits_as<__m128d>(x))));
  }
#endif
  return __builtin_convertvector(x, Vec<float, kLanes>);
}

template <int kLanes>
FUSEWIRE_ALWAYS_INLINE Vec<uint32_t, kLanes> to_words(Vec<uint16_t, kLanes> x) {
#ifdef __AVX512F__
  if constexpr (kLanes == 16) return bits_as<Vec<uint32_t, 16>>(_mm512_cvtepu16_epi32(bits_as<__m256i>(x)));
#endif
#ifdef __AVX2__
  if constexpr (kLanes == 8) return bits_as<Vec<uint32_t, 8>>(_mm256_cvtepu16_epi32(bits_as<__m128i>(x)));
#endif
#ifdef __SSE2__
  if constexpr (kLanes == 4) {
    return bits_as<Vec<uint32_t, 4>>(_mm_unpacklo_epi16(from_eight_bytes(x), _mm_setzero_si128()));
  }
#endif
  return __builtin_convertvector(x, Vec<uint32_t, kLanes>);
}

// Keeps the low half of each lane.
template <int kLanes>
FUSEWIRE_ALWAYS_INLINE Vec<uint16_t, kLanes> to_shorts(Vec<uint32_t, kLanes> x) {
#ifdef __AVX512F__
  if constexpr (kLanes == 16) return bits_as<Vec<uint16_t, 16>>(_mm512_cvtepi32_epi16(bits_as<__m512i>(x)));
  if constexpr (kLanes == 8) return bits_as<Vec<uint16_t, 8>>(_mm256_cvtepi32_epi16(bits_as<__m256i>(x)));
#elif defined(__AVX2__)
  if constexpr (kLanes == 8) {
    const __m256i low = _mm256_and_si256(bits_as<__m256i>(x), _mm256_set1_epi32(0xffff));
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
    return bits_as<Vec<uint16_t, 8>>(_mm256_castsi256_si128(packed));
  }
#endif
#ifdef __SSE2__
  if constexpr (kLanes == 4) {  // sign-extended, so that the signed saturation of the packing never acts
    const __m128i low = _mm_srai_epi32(_mm_slli_epi32(bits_as<__m128i>(x), 16), 16);
    return to_eight_bytes<Vec<uint16_t, 4>>(_mm_packs_epi32(low, low));
  }
#endif
  return __builtin_convertvector(x, Vec<uint16_t, kLanes>);
}

// Comparison results of doubles, for use with floats.
template <int kLanes>
FUSEWIRE_ALWAYS_INLINE Vec<int32_t, kLanes> to_narrow_mask(Vec<int64_t, kLanes> x) {
#ifdef __AVX512F__
  if constexpr (kLanes == 8) return bits_as<Vec<int32_t, 8>>(_mm512_cvtepi64_epi32(bits_as<__m512i>(x)));
#endif
#ifdef __AVX2__
  if constexpr (kLanes == 4) {
    const __m256i even = _mm256_permutevar8x32_epi32(bits_as<__m256i>(x), _mm256_setr_epi32(0, 2, 4, 6, 0, 0, 0, 0));
    return bits_as<Vec<int32_t, 4>>(_mm256_castsi256_si128(even));
  }
#endif
#ifdef __SSE2__
  if constexpr (kLanes == 2) {
    return to_eight_bytes<Vec<int32_t, 2>>(_mm_shuffle_epi32(bits_as<__m128i>(x), 0x08));
  }
#endif
  return __builtin_convertvector(x, Vec<int32_t, kLanes>);
}

// ---- half-width floats; lane by lane the arithmetic of element.h ----

template <int kLanes>
FUSEWIRE_ALWAYS_INLINE Vec<float, kLanes> halves_to_floats(Vec<uint16_t, kLanes> x) {
#ifdef __AVX512F__
  if constexpr (kLanes == 16) return bits_as<Vec<float, 16>>(_mm512_cvtph_ps(bits_as<__m256i>(x)));
#endif
#ifdef __F16C__
  if constexpr (kLanes == 8) return bits_as<Vec<float, 8>>(_mm256_cvtph_ps(bits_as<__m128i>(x)));
  if constexpr (kLanes == 4) {
    return bits_as<Vec<float, 4>>(_mm_cvtph_ps(from_eight_bytes(x)));
  }
#endif
  using Words = Vec<uint32_t, kLanes>;
  using Ints = Vec<int32_t, kLanes>;
  using Floats = Vec<float, kLanes>;
  const Words word = to_words<kLanes>(x);
  const Words sign = (word & 0x8000u) << 16;
  const Words magnitude = word & 0x7fffu;
  const Words normal = (magnitude << 13) + 0x38000000u;
  const Words special = (magnitude << 13) | 0x7f800000u;
  const Words subnormal = bits_as<Words>(__builtin_convertvector(bits_as<Ints>(magnitude), Floats) * 0x1p-24f);
  const Words small = bits_as<Words>(bits_as<Ints>(magnitude) < 0x400);
  const Words large = bits_as<Words>(bits_as<Ints>(magnitude) >= 0x7c00);
  return bits_as<Floats>(sign | (small & subnormal) | (large & special) | (~(small | large) & normal));
}

template <int kLanes>
FUSEWIRE_ALWAYS_INLINE Vec<uint16_t, kLanes> floats_to_halves(Vec<float, kLanes> x) {
#ifdef __AVX512F__
  if constexpr (kLanes == 16) {
    return bits_as<Vec<uint16_t, 16>>(_mm512_cvtps_ph(bits_as<__m512>(x), _MM_FROUND_TO_NEAREST_INT));
  }
#endif
#ifdef __F16C__
  if constexpr (kLanes == 8) {
    return bits_as<Vec<uint16_t, 8>>(_mm256_cvtps_ph(bits_as<__m256>(x), _MM_FROUND_TO_NEAREST_INT));
  }
  if constexpr (kLanes == 4) {
    const __m128i halves = _mm_cvtps_ph(bits_as<__m128>(x), _MM_FROUND_TO_NEAREST_INT);
    return to_eight_bytes<Vec<uint16_t, 4>>(halves);
  }
#endif
  using Words = Vec<uint32_t, kLanes>;
  using Ints = Vec<int32_t, kLanes>;
  using Floats = Vec<float, kLanes>;
  const Words bits = bits_as<Words>(x);
  const Words sign = bits >> 16 & 0x8000u;
  const Words magnitude = bits & 0x7fffffffu;
  const Words nan = bits_as<Words>(bits_as<Ints>(magnitude) > 0x7f800000);
  const Words infinite = bits_as<Words>(bits_as<Ints>(magnitude) >= 0x477ff000);
  const Words small = bits_as<Words>(bits_as<Ints>(magnitude) < 0x38800000);
  const Words normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  const Words subnormal = bits_as<Words>(bits_as<Floats>(magnitude & small) + 0.5f) - 0x3f000000u;
  const Words finite = (small & subnormal) | (~small & normal);
  const Words special = 0x7c00u | (nan & (0x200u | (magnitude >> 13 & 0x3ffu)));
  return to_shorts<kLanes>(sign | (infinite & special) | (~infinite & finite));
}

template <int kLanes>
FUSEWIRE_ALWAYS_INLINE Vec<float, kLanes> bfloats_to_floats(Vec<uint16_t, kLanes> x) {
  return bits_as<Vec<float, kLanes>>(to_words<kLanes>(x) << 16);
}

template <int kLanes>
FUSEWIRE_ALWAYS_INLINE Vec<uint16_t, kLanes> floats_to_bfloats(Vec<float, kLanes> x) {
  using Words = Vec<uint32_t, kLanes>;
  const Words bits = bits_as<Words>(x);
  const Words rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  const Words chosen = x == x ? rounded : (bits | 0x400000u);
  return to_shorts<kLanes>(chosen >> 16);
}

// element.h: Note [Round to odd]
template <int kLanes>
FUSEWIRE_ALWAYS_INLINE Vec<float, kLanes> doubles_to_odd_floats(Vec<double, kLanes> x) {
  using Ints = Vec<int32_t, kLanes>;
  using Longs = Vec<int64_t, kLanes>;
  const auto nearest = to_floats<kLanes>(x);
  const auto back = to_doubles<kLanes>(nearest);
  const Longs magnitude = bits_as<Longs>(x) & 0x7fffffffffffffff;
  const Longs back_magnitude = bits_as<Longs>(back) & 0x7fffffffffffffff;
  const Longs inexact = (back < x) | (back > x);  // not for NaN
  const Longs beyond = inexact & (back_magnitude > magnitude);
  // Masks are 0 or -1: adding one steps toward zero.
  const Ints bits = bits_as<Ints>(nearest) + to_narrow_mask<kLanes>(beyond);
  return bits_as<Vec<float, kLanes>>(bits | (to_narrow_mask<kLanes>(inexact) & 1));
}

// ---- memory of type T <-> vectors of the type W that is computed in ----

template <class W, class T, int kLanes>
FUSEWIRE_ALWAYS_INLINE Vec<W, kLanes> widen_from(const char* from) {
  if constexpr (sizeof(T) == 2 && sizeof(W) > 2) {
    const auto bits = load_vector<Vec<uint16_t, kLanes>>(from);
    Vec<float, kLanes> floats;
    if constexpr (is_same<T, Half>) {
      floats = halves_to_floats<kLanes>(bits);
    } else {
      floats = bfloats_to_floats<kLanes>(bits);
    }
    if constexpr (is_same<W, double>) {
      return to_doubles<kLanes>(floats);
    } else {
      return floats;
    }
  } else if constexpr (is_same<T, Bool>) {
    return bits_as<Vec<W, kLanes>>((load_vector<Vec<uint8_t, kLanes>>(from) != 0) & 1);
  } else if constexpr (is_same<T, W>) {
    return load_vector<Vec<W, kLanes>>(from);
  } else {
    static_assert(is_same<T, float> && is_same<W, double>, "the only other widening");
    return to_doubles<kLanes>(load_vector<Vec<float, kLanes>>(from));
  }
}

template <class W, class T, int kLanes>
FUSEWIRE_ALWAYS_INLINE void narrow_to(char* to, Vec<W, kLanes> v) {
  if constexpr (sizeof(T) == 2 && sizeof(W) > 2) {
    Vec<float, kLanes> floats;
    if constexpr (is_same<W, double>) {
      floats = doubles_to_odd_floats<kLanes>(v);
    } else {
      floats = v;
    }
    if constexpr (is_same<T, Half>) {
      store_vector(to, floats_to_halves<kLanes>(floats));
    } else {
      store_vector(to, floats_to_bfloats<kLanes>(floats));
    }
  } else if constexpr (is_same<T, W> || is_same<T, Bool>) {
    store_vector(to, v);
  } else if constexpr (is_same<W, double>) {
    store_vector(to, to_floats<kLanes>(v));
  } else {
    store_vector(to, to_doubles<kLanes>(v));
  }
}

}  // namespace FUSEWIRE_ISA
}  // namespace fusewire::element
