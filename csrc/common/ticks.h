// The cheapest clock there is: 10 ns where std::chrono::steady_clock takes 25. For durations that are added up always,
// not for times that are shown.
#pragma once

#include <chrono>
#include <cstdint>

#if defined(__x86_64__)
#include <x86intrin.h>
#endif

namespace fusewire {

inline uint64_t ticks() {
#if defined(__x86_64__)
  return __rdtsc();
#elif defined(__aarch64__)
  uint64_t value;
  asm volatile("mrs %0, cntvct_el0" : "=r"(value));
  return value;
#else
  return static_cast<uint64_t>(std::chrono::steady_clock::now().time_since_epoch().count());
#endif
}

// How long a tick is, by the steady clock, since this object was made. The longer ago, the better it knows.
class TickRate {
 public:
  double seconds(uint64_t duration) const {
    const auto elapsed = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
    const uint64_t passed = ticks() - start_ticks_;
    return passed == 0 ? 0 : static_cast<double>(duration) * (elapsed / static_cast<double>(passed));
  }

 private:
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  uint64_t start_ticks_ = ticks();
};

}  // namespace fusewire
