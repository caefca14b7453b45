// A copy whose stores go around the caches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "kernels/kernels.h"

namespace fusewire {

// Note [Streaming stores]
// An ordinary store to a line that is not in the cache reads it from memory first. A large output that this operation
// has not read (out of place, or of a broadcast) is written around the caches instead, which saves that read and leaves
// the caches to the slots: 64 MB out of place in 12 instead of 15 ms. Where the output is also the input its lines are
// still in the cache, and the same stores would cost 10 %.
inline constexpr size_t kStreamBytes = 8 << 20;  // buckets that would push everything else out of the cache anyway

// `source` and `destination` must not overlap.
inline void stream_copy(std::byte* destination, const std::byte* source, size_t bytes) {
#if defined(__SSE2__) && !defined(__SANITIZE_THREAD__)  // it does not see these stores
  constexpr size_t kLine = 64;
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(destination) % kLine) % kLine;
  if (bytes < head + kLine) {
    std::memcpy(destination, source, bytes);
    return;
  }
  std::memcpy(destination, source, head);
  size_t i = head;
  for (; i + kLine <= bytes; i += kLine) {
    const auto* from = reinterpret_cast<const __m128i*>(source + i);
    auto* to = reinterpret_cast<__m128i*>(destination + i);
    const __m128i a = _mm_loadu_si128(from);
    const __m128i b = _mm_loadu_si128(from + 1);
    const __m128i c = _mm_loadu_si128(from + 2);
    const __m128i d = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, a);
    _mm_stream_si128(to + 1, b);
    _mm_stream_si128(to + 2, c);
    _mm_stream_si128(to + 3, d);
  }
  std::memcpy(destination + i, source + i, bytes - i);
  _mm_sfence();  // release stores do not order streaming stores
#else
  cpu_kernels().copy(destination, source, bytes);
#endif
}

}  // namespace fusewire
