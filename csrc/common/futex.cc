#include "common/futex.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace fusewire {
namespace {

const uint32_t* address(const std::atomic<uint32_t>& word) {
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t));
  return reinterpret_cast<const uint32_t*>(&word);
}

}  // namespace

bool futex_wait(const std::atomic<uint32_t>& word, uint32_t expected, std::optional<std::chrono::nanoseconds> timeout,
                uint32_t mask) {
  timespec until{};
  if (timeout) {
    // FUTEX_WAIT_BITSET takes an absolute time on CLOCK_MONOTONIC. A timeout too long to add up is a century.
    constexpr int64_t kSecond = 1'000'000'000;
    clock_gettime(CLOCK_MONOTONIC, &until);
    const int64_t nanos = until.tv_nsec + std::clamp<int64_t>(timeout->count(), 0, kSecond * 3'000'000'000);
    until.tv_sec += static_cast<time_t>(nanos / kSecond);
    until.tv_nsec = static_cast<long>(nanos % kSecond);
  }
  return syscall(SYS_futex, address(word), FUTEX_WAIT_BITSET, expected, timeout ? &until : nullptr, nullptr, mask) !=
             0 &&
         errno == EINTR;
}

void futex_wake(const std::atomic<uint32_t>& word, int count, uint32_t mask) {
  syscall(SYS_futex, address(word), FUTEX_WAKE_BITSET, count, nullptr, nullptr, mask);
}

}  // namespace fusewire
