// Records with a text from many threads to one reader: no lock, no allocation, and nobody ever waits.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>

namespace fusewire {

enum class TraceKind : uint8_t {
  kSubmit,    // text: the unit's name; a: bytes, b: tensors
  kAnnounce,  // text: the unit's name; a: the rank that has announced it (root only)
  kAnswer,    // all members have announced the unit
  kEnd,       // the unit is done without having run here; text: why it failed, if it did
  kBucket,    // a bucket begins; a: its number, b: its bytes, count: its units, which follow
  kMember,    // a unit of the bucket; a, b: its elements [a, b) in there
  kChunk,     // `step` of the bucket's elements [a, b)
  kRan,       // the bucket has ended; text: why it failed, if it did
  kDevice,    // a bucket's time on the GPU; a: its number, what: its kind
  kCycle,
};

struct TraceRecord {
  TraceKind kind = TraceKind::kCycle;
  uint8_t step = 0;   // ChunkStep
  uint8_t what = 0;   // OpKind
  uint8_t op = 0;     // ReduceOp
  uint8_t dtype = 0;  // DataType
  uint8_t wire = 0;   // DataType
  uint16_t text = 0;  // bytes of it that follow
  uint32_t set = 0;   // process set
  uint32_t count = 0;
  int64_t begin = 0;  // nanoseconds of the steady clock
  int64_t end = 0;
  uint64_t unit = 0;  // the unit's number in the trace, 0: none
  int64_t a = 0;
  int64_t b = 0;
};

// Note [Trace ring]
// A ring of cells of one cache line. A record takes one cell and its text as many as it needs. `head_` counts cells
// ever taken; a writer takes n of them by moving it, after it has seen that the last of them is free: the reader frees
// cells in order, so then all are. Cell i (of turn t = i / cells) says with `turn` what it holds: 2t = free, 2t + 1 =
// written. A writer marks its first cell last; the reader, which owns `tail_`, therefore sees whole records or nothing,
// and a writer that is interrupted half-way delays the reader but nobody else. Without room a record is dropped and
// counted.
class TraceRing {
 public:
  static constexpr size_t kLongestText = 1024;

  explicit TraceRing(size_t cells) : mask_(cells - 1), cells_(std::make_unique<Cell[]>(cells)) {}

  // Returns the number of cells in use afterwards, 0 when there was no room.
  size_t push(TraceRecord record, std::string_view text = {}) {
    text = text.substr(0, kLongestText);
    record.text = static_cast<uint16_t>(text.size());
    const size_t extra = (text.size() + kPayload - 1) / kPayload;
    const size_t needed = 1 + extra;
    uint64_t first = head_.load(std::memory_order_relaxed);
    for (;;) {
      const uint64_t last = first + needed - 1;
      const uint64_t turn = cell(last).turn.load(std::memory_order_acquire);
      if (turn == free_at(last)) {
        if (head_.compare_exchange_weak(first, first + needed, std::memory_order_relaxed)) break;
      } else if (turn < free_at(last)) {
        dropped_.fetch_add(1, std::memory_order_relaxed);
        return 0;
      } else {
        first = head_.load(std::memory_order_relaxed);  // others have been faster
      }
    }
    for (size_t i = 0; i < extra; ++i) {
      const std::string_view part = text.substr(i * kPayload, kPayload);
      std::memcpy(cell(first + 1 + i).payload, part.data(), part.size());
    }
    std::memcpy(cell(first).payload, &record, sizeof record);
    // A full barrier: what the caller reads next (whether the reader sleeps) is read after the record is there.
    cell(first).turn.exchange(free_at(first) + 1, std::memory_order_seq_cst);
    return static_cast<size_t>(first + needed - tail_.load(std::memory_order_relaxed));
  }

  // The reader's. False: there is none.
  bool pop(TraceRecord& record, std::string& text) {
    const uint64_t tail = tail_.load(std::memory_order_relaxed);
    if (cell(tail).turn.load(std::memory_order_acquire) != free_at(tail) + 1) return false;
    std::memcpy(&record, cell(tail).payload, sizeof record);
    const size_t extra = (record.text + kPayload - 1) / kPayload;
    text.resize(record.text);
    for (size_t i = 0; i < extra; ++i) {
      const size_t done = i * kPayload;
      std::memcpy(text.data() + done, cell(tail + 1 + i).payload, std::min(kPayload, text.size() - done));
    }
    for (uint64_t i = tail; i <= tail + extra; ++i) {
      cell(i).turn.store(free_at(i + mask_ + 1), std::memory_order_release);
    }
    tail_.store(tail + 1 + extra, std::memory_order_relaxed);
    return true;
  }

  // The reader's.
  bool empty() {
    const uint64_t tail = tail_.load(std::memory_order_relaxed);
    return cell(tail).turn.load(std::memory_order_seq_cst) != free_at(tail) + 1;
  }

  size_t cells() const { return mask_ + 1; }
  uint64_t take_dropped() { return dropped_.exchange(0, std::memory_order_relaxed); }

 private:
  static constexpr size_t kPayload = 56;
  struct alignas(64) Cell {
    std::atomic<uint64_t> turn{0};
    std::byte payload[kPayload];
  };
  static_assert(sizeof(TraceRecord) <= kPayload);

  Cell& cell(uint64_t index) { return cells_[index & mask_]; }
  uint64_t free_at(uint64_t index) const { return 2 * (index / (mask_ + 1)); }

  const size_t mask_;
  const std::unique_ptr<Cell[]> cells_;
  alignas(64) std::atomic<uint64_t> head_{0};
  alignas(64) std::atomic<uint64_t> tail_{0};
  std::atomic<uint64_t> dropped_{0};
};

}  // namespace fusewire
