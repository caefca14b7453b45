#include "collective/peer_memory.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <random>

namespace fusewire {

std::atomic<PeerMemory::Call> PeerMemory::call_ = ::process_vm_readv;

PeerMemory::PeerMemory(int size) : pids_(static_cast<size_t>(size)), word_(1) {
  std::random_device random;
  word_.front() = uint64_t{random()} << 32 | random();
}

MemoryCard PeerMemory::card() const {
  return {getpid(), word_.front(), reinterpret_cast<const std::byte*>(word_.data())};
}

bool PeerMemory::try_card(int peer, const MemoryCard& card) {
  pids_[static_cast<size_t>(peer)] = card.pid;
  uint64_t word = 0;
  return read(peer, {{reinterpret_cast<std::byte*>(&word), card.address, sizeof(word)}}) && word == card.word;
}

bool PeerMemory::read(int peer, const std::vector<Copy>& copies) const {
  const pid_t pid = pids_[static_cast<size_t>(peer)];
  constexpr size_t kBatch = 64;
  constexpr size_t kMostBytes = size_t{1} << 30;  // a call moves less than 2 GiB
  std::array<iovec, kBatch> to;
  std::array<iovec, kBatch> from;
  size_t done = 0;  // bytes of copies[next]
  for (size_t next = 0; next < copies.size();) {
    size_t filled = 0;
    size_t wanted = 0;
    while (next < copies.size() && filled < kBatch && wanted < kMostBytes) {
      const Copy& copy = copies[next];
      const size_t bytes = std::min(copy.bytes - done, kMostBytes - wanted);
      to[filled] = {copy.to + done, bytes};
      from[filled] = {const_cast<std::byte*>(copy.from) + done, bytes};
      ++filled;
      wanted += bytes;
      done += bytes;
      if (done < copy.bytes) break;
      done = 0;
      ++next;
    }
    // Less than wanted: it stopped before what it could not read.
    if (call_.load()(pid, to.data(), filled, from.data(), filled, 0) != static_cast<ssize_t>(wanted)) return false;
  }
  return true;
}

}  // namespace fusewire
