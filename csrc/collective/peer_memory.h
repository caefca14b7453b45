// Reading another rank's memory where it lies, by process_vm_readv: one copy instead of two. Ranks that are threads of
// one process do the same, for it fails where a plain copy would crash: on memory of a rank that has given up
// meanwhile.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace fusewire {

// What a rank shows its peers so that they can try.
struct MemoryCard {
  pid_t pid = 0;
  uint64_t word = 0;  // a random one, which lies at:
  const std::byte* address = nullptr;
};

class PeerMemory {
 public:
  explicit PeerMemory(int size);

  // This rank's card; its word lives as long as this object.
  MemoryCard card() const;

  // Whether the memory that a card speaks of can be read. The word tells a process of the same number in another
  // namespace from the one that is meant.
  bool try_card(int peer, const MemoryCard& card);

  // Whether every rank can read every other's: unknown before set_everyone().
  bool known() const { return known_; }
  bool everyone() const { return everyone_; }
  void set_everyone(bool can) {
    known_ = true;
    everyone_ = can;
  }

  struct Copy {
    std::byte* to;
    const std::byte* from;  // in the peer's memory
    size_t bytes;
  };

  // False: it cannot be read. The peer may have died, or the memory may be such as only its owner can see (a device's).
  bool read(int peer, const std::vector<Copy>& copies) const;

  // The system call that reads; tests put one in its place that fails.
  using Call = ssize_t (*)(pid_t, const iovec*, unsigned long, const iovec*, unsigned long, unsigned long);
  static void set_call(Call call) { call_.store(call); }

 private:
  static std::atomic<Call> call_;
  std::vector<pid_t> pids_;
  std::vector<uint64_t> word_;  // one, on the heap: its address must not change
  bool known_ = false;
  bool everyone_ = false;
};

}  // namespace fusewire
