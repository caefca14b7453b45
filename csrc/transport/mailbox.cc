#include "transport/mailbox.h"

#include <algorithm>
#include <cstring>

#include "common/error.h"
#include "transport/endpoint.h"

namespace fusewire {
namespace {

constexpr size_t kLengthBytes = sizeof(uint32_t);

size_t position(uint64_t count) { return static_cast<size_t>(count & (kRingBytes - 1)); }

void put_length(std::byte* to, size_t length) {
  const auto value = static_cast<uint32_t>(length);
  std::memcpy(to, &value, kLengthBytes);
}

}  // namespace

size_t FrameSender::room() {
  size_t used = static_cast<size_t>(tail_ - head_);
  if (used < kRingBytes) return kRingBytes - used;
  head_ = ring_->head.load(std::memory_order_acquire);
  if (tail_ - head_ > kRingBytes) {
    fault_ = "malformed frame: it claims to have read more than was sent";
    return 0;
  }
  used = static_cast<size_t>(tail_ - head_);
  return kRingBytes - used;
}

// Copies what fits; the caller publishes.
size_t FrameSender::write(std::span<const std::byte> bytes) {
  size_t done = 0;
  while (done < bytes.size()) {
    const size_t at = position(tail_);
    const size_t count = std::min({bytes.size() - done, room(), kRingBytes - at});
    if (count == 0) break;
    std::memcpy(ring_->bytes + at, bytes.data() + done, count);
    tail_ += count;
    done += count;
  }
  return done;
}

bool FrameSender::arm() {
  ring_->wants_room.exchange(1, std::memory_order_seq_cst);
  return ring_->head.load(std::memory_order_seq_cst) == head_;
}

bool FrameSender::send(std::span<const std::byte> frame) {
  if (frame.size() > kMaxFrameBytes) {
    throw Error(ErrorCode::kInvalidArgument, "a control frame of " + std::to_string(frame.size()) +
                                                 " bytes is larger than the limit of " +
                                                 std::to_string(kMaxFrameBytes));
  }
  if (!fault_.empty()) return false;
  const uint64_t before = tail_;
  std::byte length[kLengthBytes];
  put_length(length, frame.size());
  size_t sent = 0;  // of length and frame together
  if (outbox_.empty()) {
    sent = write(length);
    if (sent == kLengthBytes) sent += write(frame);
    if (sent == kLengthBytes + frame.size()) {
      ring_->tail.store(tail_, std::memory_order_release);
      return true;
    }
  }
  std::vector<std::byte> rest(kLengthBytes + frame.size());
  std::copy_n(length, kLengthBytes, rest.begin());
  std::copy(frame.begin(), frame.end(), rest.begin() + kLengthBytes);
  if (outbox_.empty()) outbox_sent_ = sent;
  outbox_.push_back(std::move(rest));
  ring_->tail.store(tail_, std::memory_order_release);
  return flush() || tail_ != before;
}

bool FrameSender::flush() {
  const uint64_t before = tail_;
  while (!outbox_.empty() && fault_.empty()) {
    const std::span<const std::byte> front = outbox_.front();
    outbox_sent_ += write(front.subspan(outbox_sent_));
    if (outbox_sent_ == front.size()) {
      outbox_.pop_front();
      outbox_sent_ = 0;
      continue;
    }
    // Publish before waiting for the reader to make room from it.
    ring_->tail.store(tail_, std::memory_order_release);
    if (fault_.empty() && arm()) break;
  }
  if (!fault_.empty()) outbox_.clear();
  waiting_at_.store(outbox_.empty() ? kNotWaiting : head_, std::memory_order_relaxed);
  ring_->tail.store(tail_, std::memory_order_release);
  return tail_ != before;
}

size_t FrameReceiver::available() {
  if (tail_ == head_) {
    tail_ = ring_->tail.load(std::memory_order_acquire);
    if (tail_ - head_ > kRingBytes) {
      fault_ = "malformed frame: it claims to have sent " + std::to_string(tail_ - head_) + " bytes at once";
      tail_ = head_;
    }
  }
  return static_cast<size_t>(tail_ - head_);
}

void FrameReceiver::take(std::vector<std::byte>& to, size_t count) {
  while (count > 0) {
    const size_t at = position(head_);
    const size_t piece = std::min(count, kRingBytes - at);
    to.insert(to.end(), ring_->bytes + at, ring_->bytes + at + piece);
    head_ += piece;
    count -= piece;
  }
}

bool FrameReceiver::take_length() {
  while (length_have_ < kLengthBytes && available() > 0) {
    length_bytes_[length_have_++] = ring_->bytes[position(head_++)];
  }
  if (length_have_ < kLengthBytes) return false;
  std::memcpy(&length_, length_bytes_, kLengthBytes);
  if (length_ > kMaxFrameBytes) {
    fault_ = "malformed frame: a length of " + std::to_string(length_) + " bytes";
    return false;
  }
  return true;
}

bool FrameReceiver::receive(std::vector<std::byte>& frame, bool& sender_waits) {
  sender_waits = false;
  if (!fault_.empty()) return false;
  const uint64_t before = head_;
  bool whole = false;
  // A frame that is there in one piece, the usual case, goes straight into the caller's vector.
  if (take_length()) {
    if (partial_.empty() && available() >= length_) {
      frame.clear();
      take(frame, length_);
      whole = true;
    } else {
      partial_.reserve(length_);
      while (partial_.size() < length_ && available() > 0) {
        take(partial_, std::min<size_t>(length_ - partial_.size(), available()));
      }
      whole = partial_.size() == length_ && fault_.empty();
      if (whole) {
        frame = std::move(partial_);
        partial_ = {};
      }
    }
    if (whole) length_have_ = 0;
  }
  if (!fault_.empty()) broken_.store(true, std::memory_order_relaxed);
  if (head_ == before) return whole;
  consumed_.store(head_, std::memory_order_relaxed);
  ring_->head.exchange(head_, std::memory_order_seq_cst);
  if (ring_->wants_room.load(std::memory_order_seq_cst) != 0 && tail_ - head_ <= kRingBytes / 2) {
    ring_->wants_room.store(0, std::memory_order_seq_cst);
    sender_waits = true;
  }
  return whole;
}

}  // namespace fusewire
