// Sleeping on a 32-bit word that may be shared between processes. Always the shared (not FUTEX_PRIVATE) kind, so the
// same code serves ranks as processes and ranks as threads.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>

namespace fusewire {

inline constexpr uint32_t kFutexAnyone = UINT32_MAX;

// Sleeps while *word == expected, until woken through a bit of `mask`, or the timeout. Spurious returns are allowed.
// Returns true when a signal handler ran: the caller may want to ask whether the user pressed Ctrl-C.
bool futex_wait(const std::atomic<uint32_t>& word, uint32_t expected,
                std::optional<std::chrono::nanoseconds> timeout = std::nullopt, uint32_t mask = kFutexAnyone);
void futex_wake(const std::atomic<uint32_t>& word, int count, uint32_t mask = kFutexAnyone);

// Tells the processor that this is a spin loop.
inline void cpu_relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace fusewire
