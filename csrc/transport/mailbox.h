// Frames from one rank to another through a ring of bytes in memory that both map. The same code serves ranks as
// threads and ranks as processes, so nothing read from shared memory is trusted: a peer can at worst be found broken.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <span>
#include <string>
#include <vector>

namespace fusewire {

inline constexpr size_t kRingBytes = 64u << 10;  // a power of two

// Note [Mailbox ring]
// One writer, one reader. `tail` counts bytes ever written and only the writer stores it; `head` counts bytes ever read
// and only the reader stores it. Each side keeps its own count privately and only ever LOADS the other's, once per
// look, and checks tail - head <= kRingBytes: after that, every copy is inside `bytes` whatever the peer does.
//
// The bytes are a stream of frames, [u32 length][length bytes], cut anywhere: a frame larger than the ring flows
// through it. A writer without room keeps the rest in its outbox, sets `wants_room`, and looks at `head` once more; a
// reader that has stored `head` looks at `wants_room` and rings the writer when at least half of the ring is free
// (not for every small frame of a full ring). All four accesses are seq_cst, so one of the two sees the other.
struct RingMemory {
  alignas(128) std::atomic<uint64_t> tail{0};
  alignas(128) std::atomic<uint64_t> head{0};
  std::atomic<uint32_t> wants_room{0};
  alignas(128) std::byte bytes[kRingBytes];
};

// Why a peer can no longer be listened to; empty while it can.
using Fault = std::string;

class FrameSender {
 public:
  explicit FrameSender(RingMemory* ring) : ring_(ring) {}

  // Returns whether bytes have become visible to the reader, who is then to be rung.
  bool send(std::span<const std::byte> frame);
  bool flush();

  // Any thread, as an engine's driver looks for work after it has left the seat.
  bool can_flush() const {
    return waiting_at_.load(std::memory_order_relaxed) != kNotWaiting &&
           ring_->head.load(std::memory_order_seq_cst) != waiting_at_.load(std::memory_order_relaxed);
  }
  // Any thread: part of a frame still waits for room.
  bool has_unsent() const { return waiting_at_.load(std::memory_order_relaxed) != kNotWaiting; }
  const Fault& fault() const { return fault_; }

 private:
  size_t room();  // bytes that may be written now
  size_t write(std::span<const std::byte> bytes);
  bool arm();  // asks the reader for a ring; false: there is room after all

  RingMemory* ring_;
  uint64_t tail_ = 0;
  uint64_t head_ = 0;  // the reader's, as last seen
  static constexpr uint64_t kNotWaiting = UINT64_MAX;
  std::atomic<uint64_t> waiting_at_{kNotWaiting};  // the reader's count for which the outbox has no room

  std::deque<std::vector<std::byte>> outbox_;  // frames with their length in front
  size_t outbox_sent_ = 0;                     // bytes of outbox_.front() already written
  Fault fault_;
};

class FrameReceiver {
 public:
  explicit FrameReceiver(RingMemory* ring) : ring_(ring) {}

  // True: `frame` holds the next one. `sender_waits` is set when the writer is to be rung. Consumes every byte there is
  // of an unfinished frame, so that has_incoming() is false afterwards.
  bool receive(std::vector<std::byte>& frame, bool& sender_waits);

  // Any thread, see can_flush(). Nobody listens to a broken peer any more. Compares with our own count, not with the
  // shared one: a peer that overwrites that must not keep a driver looking for ever.
  bool has_incoming() const {
    return ring_->tail.load(std::memory_order_seq_cst) != consumed_.load(std::memory_order_relaxed) &&
           !broken_.load(std::memory_order_relaxed);
  }
  const Fault& fault() const { return fault_; }

 private:
  size_t available();
  void take(std::vector<std::byte>& to, size_t count);
  bool take_length();

  RingMemory* ring_;
  uint64_t head_ = 0;
  uint64_t tail_ = 0;  // the writer's, as last seen
  std::byte length_bytes_[4];
  size_t length_have_ = 0;  // 4: `length_` is known
  uint32_t length_ = 0;
  std::vector<std::byte> partial_;
  Fault fault_;
  std::atomic<uint64_t> consumed_{0};  // head_ as of the last receive()
  std::atomic<bool> broken_{false};    // fault_ is set
};

}  // namespace fusewire
