#include "transport/star.h"

#include "common/error.h"

namespace fusewire {

StarEndpoint::StarEndpoint(int rank, int size, const StarMemory& memory)
    : rank_(rank), size_(size), seat_(memory.seat(rank)) {
  if (rank == 0) {
    for (int leaf = 1; leaf < size; ++leaf) {
      links_.push_back(std::make_unique<Link>(leaf, memory.up(leaf), memory.down(leaf), memory.seat(leaf)));
    }
  } else {
    links_.push_back(std::make_unique<Link>(0, memory.down(rank), memory.up(rank), memory.seat(0)));
  }
}

StarEndpoint::Link& StarEndpoint::link_to(int peer) {
  const int index = rank_ == 0 ? peer - 1 : peer;
  if (index < 0 || index >= static_cast<int>(links_.size())) {
    throw Error(ErrorCode::kInvalidArgument,
                "rank " + std::to_string(rank_) + " has no connection to rank " + std::to_string(peer));
  }
  return *links_[static_cast<size_t>(index)];
}

void StarEndpoint::check(Link& link) {
  const Fault& fault = link.sender.fault().empty() ? link.receiver.fault() : link.sender.fault();
  if (fault.empty() || link.fault_told) return;
  link.fault_told = true;
  on_fault(link, fault);
}

void StarEndpoint::send(int peer, std::span<const std::byte> frame) {
  Link& link = link_to(peer);
  if (forgotten() || link.departed.load(std::memory_order_relaxed)) return;
  if (link.sender.send(frame)) link.seat.ring();
  check(link);
}

bool StarEndpoint::receive(int peer, std::vector<std::byte>& frame) {
  Link& link = link_to(peer);
  if (forgotten()) return false;
  bool sender_waits = false;
  const bool got = link.receiver.receive(frame, sender_waits);
  if (sender_waits) link.seat.ring();
  check(link);
  return got;
}

bool StarEndpoint::has_incoming() const {
  if (forgotten()) return false;
  for (const auto& link : links_) {
    if (link->receiver.has_incoming()) return true;
    if (link->sender.can_flush() && !link->departed.load(std::memory_order_relaxed)) return true;
  }
  return false;
}

bool StarEndpoint::has_unsent() const {
  if (forgotten()) return false;
  for (const auto& link : links_) {
    if (link->sender.has_unsent() && !link->departed.load(std::memory_order_relaxed)) return true;
  }
  return false;
}

void StarEndpoint::flush() {
  if (forgotten()) return;
  for (const auto& link : links_) {
    if (link->departed.load(std::memory_order_relaxed)) continue;
    if (link->sender.flush()) link->seat.ring();
    check(*link);
  }
}

void StarEndpoint::forget_memory() {
  seat_ = Seat(&own_word_);
  forgotten_.store(true, std::memory_order_relaxed);
}

}  // namespace fusewire
