// What both kinds of Endpoint share: the layout of the memory of a star of `size` ranks, and the driver's half (frames
// and rings) over it.
#pragma once

#include <atomic>
#include <vector>

#include "transport/endpoint.h"
#include "transport/mailbox.h"
#include "transport/seat.h"

namespace fusewire {

// Control memory: a seat per rank, then for every leaf a ring up (to rank 0) and a ring down. Zero-filled memory is a
// valid initial state of all of it.
class StarMemory {
 public:
  StarMemory(std::byte* base, int size) : base_(base), size_(size) {}

  static size_t bytes(int size) {
    return static_cast<size_t>(size) * sizeof(SeatWord) + static_cast<size_t>(size - 1) * 2 * sizeof(RingMemory);
  }
  SeatWord* seat(int rank) const { return reinterpret_cast<SeatWord*>(base_) + rank; }
  RingMemory* up(int leaf) const { return rings() + static_cast<ptrdiff_t>(leaf - 1) * 2; }
  RingMemory* down(int leaf) const { return up(leaf) + 1; }

 private:
  RingMemory* rings() const { return reinterpret_cast<RingMemory*>(base_ + size_ * sizeof(SeatWord)); }
  std::byte* base_;
  int size_;
};

class StarEndpoint : public Endpoint {
 public:
  StarEndpoint(int rank, int size, const StarMemory& memory);

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  void send(int peer, std::span<const std::byte> frame) override;
  bool receive(int peer, std::vector<std::byte>& frame) override;
  bool has_incoming() const override;
  void flush() override;
  bool has_unsent() const override;
  Seat& seat() override { return seat_; }

 protected:
  struct Link {
    Link(int peer, RingMemory* in, RingMemory* out, SeatWord* word)
        : rank(peer), seat(word), sender(out), receiver(in) {}
    int rank;
    Seat seat;  // the peer's
    FrameSender sender;
    FrameReceiver receiver;
    std::atomic<bool> departed{false};  // nothing is sent to it any more
    bool fault_told = false;
  };

  // The peer on `link` has broken the protocol: see Link's sender and receiver for how. Called by the driver, once.
  virtual void on_fault(Link& link, const Fault& fault) = 0;

  std::vector<std::unique_ptr<Link>>& links() { return links_; }  // all neighbours, by rank
  Link& link_to(int peer);

  // From here on nothing touches the shared memory: it may be gone.
  void forget_memory();
  bool forgotten() const { return forgotten_.load(std::memory_order_relaxed); }

 private:
  void check(Link& link);

  const int rank_;
  const int size_;
  Seat seat_;
  SeatWord own_word_;  // stands in for the shared one after forget_memory()
  std::atomic<bool> forgotten_{false};
  std::vector<std::unique_ptr<Link>> links_;
};

}  // namespace fusewire
