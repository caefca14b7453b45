// Traffic for endpoint tests: frames whose every byte follows from a seed, and a driver that sits in the seat the way
// the engine does.
#pragma once

#include <cstring>
#include <random>
#include <vector>

#include "common/futex.h"
#include "transport/endpoint.h"

namespace fusewire::testing {

// Mostly small, some around the size of a ring, a few larger than several rings.
inline size_t random_size(std::mt19937_64& random) {
  const uint64_t kind = random() % 100;
  if (kind < 80) return random() % 300;
  if (kind < 97) return random() % 9000;
  if (kind < 99) return 65536 - 40 + random() % 80;
  return random() % 300000;
}

inline std::vector<std::byte> make_frame(size_t size, uint64_t seed) {
  std::vector<std::byte> frame(size);
  uint64_t word = seed * 0x9E3779B97F4A7C15ULL + size;
  for (size_t i = 0; i < size; ++i) {
    word = word * 6364136223846793005ULL + 1442695040888963407ULL;
    frame[i] = static_cast<std::byte>(word >> 56);
  }
  return frame;
}

inline std::vector<std::byte> text_frame(std::string_view text) {
  std::vector<std::byte> frame(text.size());
  std::memcpy(frame.data(), text.data(), text.size());
  return frame;
}

// Holds the endpoint's seat as a caller and sleeps in it until something can be received from `peer`.
class SeatedDriver {
 public:
  explicit SeatedDriver(Endpoint& endpoint, int spins = 100) : endpoint_(endpoint), spins_(spins) {
    while (!endpoint_.seat().take_as_caller()) cpu_relax();
  }
  ~SeatedDriver() { endpoint_.seat().leave(); }
  SeatedDriver(const SeatedDriver&) = delete;
  SeatedDriver& operator=(const SeatedDriver&) = delete;

  // Sleeps until something has come in or can be flushed (or the seat was rung for another reason).
  void idle() {
    for (int i = 0; i < spins_; ++i) {
      if (endpoint_.has_incoming()) return;
      cpu_relax();
    }
    Seat& seat = endpoint_.seat();
    const uint32_t ticket = seat.announce_sleep();
    if (endpoint_.has_incoming()) {
      seat.cancel_sleep();
    } else {
      seat.sleep(ticket, std::nullopt);
    }
  }

  std::vector<std::byte> receive(int peer) {
    std::vector<std::byte> frame;
    for (;;) {
      endpoint_.flush();
      if (endpoint_.receive(peer, frame)) return frame;
      idle();
    }
  }

 private:
  Endpoint& endpoint_;
  int spins_;
};

}  // namespace fusewire::testing
