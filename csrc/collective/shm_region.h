// What lies where in the memory that the ranks of one set share. All of it starts as zeros and is touched lazily.
//
//   header      the abort word, and how many ranks sleep
//   per rank    a progress line (written by its rank, read by all) and a sleep line
//   per rank    kShmBuffers slots of kShmMaxChunk bytes
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace fusewire {

// Two cache lines: the prefetcher of x86 fetches neighbours in pairs.
inline constexpr size_t kShmLine = 128;

// Three chunks are in work at a time (shm_allreduce_sliced.cc, Note [Pipeline]); one more slot, so that a rank may pack
// the next chunk while a slower one still copies the oldest.
inline constexpr int64_t kShmBuffers = 4;

// The largest chunk, so the size of a slot.
inline constexpr size_t kShmMaxChunk = 1 << 20;

// What a rank has done with a chunk. Chunks are numbered from 1 over the life of the set, by all ranks alike, whatever
// the algorithm; a rank publishes for each stage the number of the last chunk that has passed it.
enum class ShmStage : uint32_t {
  kPacked,   // its slot holds its contributions
  kReduced,  // it has finished reading contributions, and the result of its slice is where result_home() says
  kCopied,   // it has finished reading results: it does not look at any slot of this chunk again
  kJoined,   // 1 once its settings (below) are there; not a stage of chunks
};
inline constexpr int kShmStages = 4;

struct alignas(kShmLine) ShmHeader {
  std::atomic<uint32_t> aborted{0};  // 0, or why everybody must stop: see ShmWaiter::stop
  alignas(kShmLine) std::atomic<uint32_t> sleeping{0};
};

struct alignas(kShmLine) ShmProgress {
  std::atomic<int64_t> reached[kShmStages];
  std::atomic<uint32_t> chunk_bytes;  // this rank's ShmOptions::chunk_bytes
  std::atomic<uint64_t> direct_bytes;
  std::atomic<int64_t> unreadable;  // the direct exchange in which this rank could not read a peer's memory; 0: none
  std::atomic<uint32_t> crowded;    // whether this rank never spins
};

// What a sleeping rank waits for: reached[stage] >= target on ranks [first, last).
struct alignas(kShmLine) ShmSleeper {
  std::atomic<uint32_t> asleep;  // the futex word; whoever moves it from 1 to 0 wakes the rank
  std::atomic<uint32_t> stage;
  std::atomic<int32_t> first;
  std::atomic<int32_t> last;
  std::atomic<int64_t> target;
};

class ShmRegion {
 public:
  ShmRegion(std::byte* base, int size) : base_(base), size_(size) {}

  static size_t bytes(int size);

  // How one chunk of `count` elements is shared out among the ranks: rank r owns [r * slice, (r + 1) * slice), clipped.
  static int64_t slice_elements(int64_t count, int size, size_t element_bytes);

  int size() const { return size_; }
  ShmHeader& header() const { return *reinterpret_cast<ShmHeader*>(base_); }
  ShmProgress& progress(int rank) const;
  ShmSleeper& sleeper(int rank) const;
  std::byte* slot(int rank, int64_t chunk) const;

  // Note [Results in place]
  // The result of rank r's slice overwrites the contributions of one of r's neighbours to that slice. Between two cores
  // a cache line that one writes, the other reads and writes, and the first reads and writes again moves once per
  // step; results in lines of their own would need a second line per element, taken away from its last reader first.
  // (Measured here with two ranks: contributions packed at 42 instead of 20 GB/s, reduced at 13 instead of 9.)
  int result_home(int rank) const { return (rank + 1) % size_; }

 private:
  std::byte* base_;
  int size_;
};

}  // namespace fusewire
