// Copying by vector loops with plain stores: another core reads a slot soon, so it should stay in the cache.
#pragma once

#include "kernels/cpu/vector.h"

namespace fusewire::element {
inline namespace FUSEWIRE_ISA {

template <int kBytes>
FUSEWIRE_ALWAYS_INLINE void copy_both_ends(char* to, const char* from, size_t bytes) {  // kBytes <= bytes <= 2 * kBytes
  using V = Vec<char, kBytes>;
  const V first = load_vector<V>(from);
  const V last = load_vector<V>(from + bytes - kBytes);
  store_vector<V>(to, first);
  store_vector<V>(to + bytes - kBytes, last);
}

inline void copy_small(char* to, const char* from, size_t bytes) {  // at most 2 * kVectorBytes
  if constexpr (kVectorBytes >= 64) {
    if (bytes >= 64) return copy_both_ends<64>(to, from, bytes);
  }
  if constexpr (kVectorBytes >= 32) {
    if (bytes >= 32) return copy_both_ends<32>(to, from, bytes);
  }
  if (bytes >= 16) return copy_both_ends<16>(to, from, bytes);
  if (bytes >= 8) return copy_both_ends<8>(to, from, bytes);
  if (bytes >= 4) return copy_both_ends<4>(to, from, bytes);
  for (size_t i = 0; i < bytes; ++i) to[i] = from[i];
}

// The regions may be equal but must not overlap otherwise.
inline void copy_bytes(char* to, const char* from, size_t bytes) {
  using V = Vec<char, kVectorBytes>;
  constexpr size_t kStep = kVectorBytes;
  if (bytes <= 2 * kStep) return copy_small(to, from, bytes);
  // One unaligned vector, then aligned stores, then one that overlaps the end.
  const V first = load_vector<V>(from);
  const V last = load_vector<V>(from + bytes - kStep);
  size_t i = kStep - reinterpret_cast<uintptr_t>(to) % kStep;
  store_vector(to, first);
  for (; i + 4 * kStep <= bytes; i += 4 * kStep) {
    V v[4];
    FUSEWIRE_UNROLL for (size_t u = 0; u < 4; ++u) v[u] = load_vector<V>(from + i + u * kStep);
    FUSEWIRE_UNROLL for (size_t u = 0; u < 4; ++u) store_vector(to + i + u * kStep, v[u]);
  }
  for (; i + kStep <= bytes; i += kStep) store_vector(to + i, load_vector<V>(from + i));
  store_vector(to + bytes - kStep, last);
}

}  // namespace FUSEWIRE_ISA
}  // namespace fusewire::element
