// Traffic for endpoint tests: frames whose every byte follows from a seed, and a driver that sits in the seat the way
// the engine does.
#pragma once

#include <condition_variable>
#include <cstring>
#include <mutex>
#include <random>
#include <string>
#include <string_view>
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

inline bool same(const std::vector<std::byte>& a, const std::vector<std::byte>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size()) == 0);
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

// A leaf and the root send each other `frames` frames of random sizes, each side at its own pace; the root answers one
// frame with one. Both rings of every leaf run full and empty, and both sides sleep. Returns an error text, or "".
inline std::string exchange_as_leaf(Endpoint& endpoint, int frames) {
  const auto rank = static_cast<uint64_t>(endpoint.rank());
  std::mt19937_64 random(rank);
  SeatedDriver driver(endpoint, rank % 2 == 0 ? 0 : 200);
  std::vector<std::byte> frame;
  int received = 0;
  const auto drain = [&] {
    while (received < frames && endpoint.receive(0, frame)) {
      if (!same(frame, make_frame(frame.size(), rank * 1000003 + static_cast<uint64_t>(received)))) return false;
      ++received;
    }
    return true;
  };
  for (int i = 0; i < frames; ++i) {
    endpoint.send(0, make_frame(random_size(random), rank * 7919 + static_cast<uint64_t>(i)));
    if (random() % 4 == 0 && !drain()) return "wrong frame down";
  }
  while (received < frames) {
    endpoint.flush();
    if (!drain()) return "wrong frame down";
    if (received < frames) driver.idle();
  }
  endpoint.send(0, text_frame("all there"));
  return same(driver.receive(0), text_frame("go")) ? "" : "no last frame";
}

inline std::string exchange_as_root(Endpoint& endpoint, int frames) {
  std::mt19937_64 random(99);
  SeatedDriver driver(endpoint);
  std::vector<std::byte> frame;
  std::vector<int> received(static_cast<size_t>(endpoint.size()), 0);
  int unfinished = endpoint.size() - 1;
  while (unfinished > 0) {
    endpoint.flush();
    for (int peer = 1; peer < endpoint.size(); ++peer) {
      const auto p = static_cast<uint64_t>(peer);
      int& count = received[p];
      while (endpoint.receive(peer, frame)) {
        if (count == frames) {
          if (!same(frame, text_frame("all there"))) return "no last frame";
          --unfinished;
          continue;
        }
        if (!same(frame, make_frame(frame.size(), p * 7919 + static_cast<uint64_t>(count)))) return "wrong frame up";
        endpoint.send(peer, make_frame(random_size(random), p * 1000003 + static_cast<uint64_t>(count)));
        ++count;
      }
    }
    if (unfinished > 0) driver.idle();
  }
  for (int peer = 1; peer < endpoint.size(); ++peer) endpoint.send(peer, text_frame("go"));
  return "";
}

// What a watch() callback was told.
class Departures {
 public:
  Endpoint::DepartureCallback callback() {
    return [this](const Departure& departure) {
      const std::lock_guard lock(mutex_);
      all_.push_back(departure);
      changed_.notify_all();
    };
  }
  size_t count() {
    const std::lock_guard lock(mutex_);
    return all_.size();
  }
  // The i-th, waiting for it.
  Departure at(size_t i) {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, std::chrono::seconds(30), [&] { return all_.size() > i; });
    return i < all_.size() ? all_[i] : Departure{.rank = -1, .clean = false, .reason = "nobody left"};
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Departure> all_;
};

}  // namespace fusewire::testing
