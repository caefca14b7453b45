// One ring with a hostile or careless other end: a writer and a reader that lie about how far they are, and lengths no
// frame can have. The reader finds a fault; it never reads or writes outside the ring (run under ASan and UBSan).
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <thread>

#include "common/error.h"
#include "transport/endpoint.h"
#include "transport/mailbox.h"
#include "transport_traffic.h"

namespace fusewire {
namespace {

using testing::make_frame;
using testing::same;
using testing::text_frame;

class Ring : public ::testing::Test {
 protected:
  // A raw writer's view of the ring.
  void put(uint64_t at, const void* data, size_t size) { std::memcpy(ring_->bytes + at, data, size); }

  bool receive() { return receiver_.receive(frame_, sender_waits_); }

  std::unique_ptr<RingMemory> ring_ = std::make_unique<RingMemory>();
  FrameSender sender_{ring_.get()};
  FrameReceiver receiver_{ring_.get()};
  std::vector<std::byte> frame_;
  bool sender_waits_ = false;
};

TEST_F(Ring, EverySizeAtEveryPositionArrivesWhole) {
  uint64_t seed = 0;
  for (int round = 0; round < 3; ++round) {
    for (size_t size = 0; size < 700; size += 1 + size / 9) {
      ASSERT_TRUE(sender_.send(make_frame(size, seed)));
      ASSERT_TRUE(receiver_.has_incoming());
      ASSERT_TRUE(receive());
      ASSERT_TRUE(same(frame_, make_frame(size, seed)));
      ++seed;
    }
  }
  // Now at every offset of the ring's end: frames of 101 + 4 bytes wrap at all of them, headers included.
  for (size_t i = 0; i < 3 * kRingBytes / 105; ++i) {
    ASSERT_TRUE(sender_.send(make_frame(101, i)));
    ASSERT_TRUE(receive());
    ASSERT_TRUE(same(frame_, make_frame(101, i)));
  }
  EXPECT_FALSE(receiver_.has_incoming());
}

TEST_F(Ring, AFrameLargerThanTheRingFlowsThroughIt) {
  const auto large = make_frame(5 * kRingBytes + 17, 1);
  EXPECT_TRUE(sender_.send(large));
  EXPECT_TRUE(sender_.send(text_frame("behind")) == false) << "nothing of it fits";
  int rings = 0;
  while (!receive()) {
    EXPECT_FALSE(receiver_.has_incoming()) << "an unfinished frame is consumed as far as it is there";
    if (sender_waits_) ++rings;
    EXPECT_TRUE(sender_.can_flush());
    EXPECT_TRUE(sender_.flush());
  }
  EXPECT_TRUE(same(frame_, large));
  EXPECT_GE(rings, 5);
  ASSERT_TRUE(receive());
  EXPECT_TRUE(same(frame_, text_frame("behind")));
  EXPECT_FALSE(sender_.can_flush());
  EXPECT_FALSE(sender_.flush());
}

TEST_F(Ring, TheWriterIsRungOnceWhenHalfOfAFullRingIsFree) {
  const auto frame = make_frame(1020, 3);
  for (int i = 0; i < 66; ++i) sender_.send(frame);  // 64 fit
  int rings = 0;
  size_t received_at_ring = 0;
  for (size_t i = 0; i < 64; ++i) {
    ASSERT_TRUE(receive());
    if (sender_waits_) {
      ++rings;
      received_at_ring = i + 1;
    }
  }
  EXPECT_EQ(rings, 1);
  EXPECT_EQ(received_at_ring, 32u);
  EXPECT_FALSE(receive());
  EXPECT_TRUE(sender_.flush());
  EXPECT_TRUE(receive());
  EXPECT_TRUE(receive());
  EXPECT_FALSE(receive());
}

TEST_F(Ring, LengthBeyondTheLimit) {
  for (const uint32_t length : {static_cast<uint32_t>(kMaxFrameBytes + 1), UINT32_MAX}) {
    auto ring = std::make_unique<RingMemory>();
    FrameReceiver receiver(ring.get());
    std::memcpy(ring->bytes, &length, sizeof length);
    ring->tail.store(100);
    EXPECT_FALSE(receiver.receive(frame_, sender_waits_));
    EXPECT_NE(receiver.fault().find("malformed frame"), Fault::npos) << receiver.fault();
    EXPECT_FALSE(receiver.has_incoming());
    EXPECT_FALSE(receiver.receive(frame_, sender_waits_));
  }
}

TEST_F(Ring, TailThatJumpsTooFarOrBack) {
  for (const uint64_t tail : {kRingBytes + uint64_t{1}, UINT64_MAX, uint64_t{1} << 63}) {
    auto ring = std::make_unique<RingMemory>();
    FrameReceiver receiver(ring.get());
    ring->tail.store(tail);
    EXPECT_TRUE(receiver.has_incoming());
    EXPECT_FALSE(receiver.receive(frame_, sender_waits_));
    EXPECT_NE(receiver.fault().find("malformed frame"), Fault::npos);
    EXPECT_FALSE(receiver.has_incoming());
  }
  // Back by a byte after a frame was read.
  ASSERT_TRUE(sender_.send(text_frame("abc")));
  ASSERT_TRUE(receive());
  ring_->tail.store(6);
  EXPECT_FALSE(receive());
  EXPECT_FALSE(receiver_.fault().empty());
}

TEST_F(Ring, AFrameThatEndsInTheMiddleIsWaitedForWithoutSpinning) {
  const uint32_t length = 100;
  put(0, &length, sizeof length);
  ring_->tail.store(2);
  EXPECT_FALSE(receive());
  EXPECT_FALSE(receiver_.has_incoming());
  ring_->tail.store(50);
  EXPECT_FALSE(receive());
  EXPECT_FALSE(receiver_.has_incoming());
  EXPECT_TRUE(receiver_.fault().empty());
  ring_->tail.store(104);
  EXPECT_TRUE(receive());
  EXPECT_EQ(frame_.size(), 100u);
}

TEST_F(Ring, AHeadThatThePeerOverwritesKeepsNobodyLooking) {
  ASSERT_TRUE(sender_.send(text_frame("abc")));
  ASSERT_TRUE(receive());
  ring_->head.store(12345);
  EXPECT_FALSE(receiver_.has_incoming());
}

TEST_F(Ring, AReaderThatClaimsToHaveReadMoreThanWasSent) {
  const auto frame = make_frame(kRingBytes - 4, 1);
  ASSERT_TRUE(sender_.send(frame));
  ring_->head.store(kRingBytes + 1);
  EXPECT_FALSE(sender_.send(frame));
  EXPECT_NE(sender_.fault().find("malformed frame"), Fault::npos);
  EXPECT_FALSE(sender_.send(frame)) << "dropped";
  EXPECT_FALSE(sender_.flush());
}

// A writer that stores rubbish everywhere, all the time, while the reader reads: whatever comes out, nothing breaks.
TEST_F(Ring, RubbishWhileReading) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 60; ++round) {
    auto ring = std::make_unique<RingMemory>();
    FrameReceiver receiver(ring.get());
    FrameSender sender(ring.get());
    for (auto& byte : ring->bytes) byte = static_cast<std::byte>(random() % 3 == 0 ? random() : 0);
    uint64_t tail = 0;
    for (int step = 0; step < 200; ++step) {
      tail += random() % 7 == 0 ? random() % (2 * kRingBytes) : random() % 500;
      ring->tail.store(tail);
      receiver.receive(frame_, sender_waits_);
      ring->head.store(ring->head.load() + random() % 3);
      sender.send(make_frame(random() % 5000, 1));
      sender.flush();
    }
  }
}

TEST_F(Ring, TooLargeToSend) {
  const std::vector<std::byte> frame(kMaxFrameBytes + 1);
  EXPECT_THROW(sender_.send(frame), Error);
  EXPECT_TRUE(sender_.send(text_frame("fine")));
}

}  // namespace
}  // namespace fusewire
