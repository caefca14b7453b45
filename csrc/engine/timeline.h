// The timeline of one rank: what happens is put into a ring by whoever does it, and written to a file by a thread that
// sleeps ("fw-trace"). While it is off, it costs its callers one look at on().
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>

#include "common/chunk_trace.h"
#include "common/types.h"
#include "engine/trace_ring.h"

namespace fusewire {

class TimelineWriter;

// Where a rank's file is: "{rank}" in the path is its number; without it and with several ranks, the number is put
// before the extension ("trace.json" -> "trace.3.json").
std::string timeline_path(const std::string& path, int rank, int size);

// Thread safety: all of it. Lock order: mutex_ is a leaf, held while a file is opened and while the thread is joined.
class Timeline {
 public:
  using Clock = std::chrono::steady_clock;

  Timeline(int rank, int size);
  ~Timeline();  // stop()
  Timeline(const Timeline&) = delete;
  Timeline& operator=(const Timeline&) = delete;

  // Throws Error(kInvalidArgument) when the file cannot be made or a timeline is being recorded. `limit_bytes`: the
  // largest size of the file, 0: none.
  void start(const std::string& path, bool mark_cycles, int64_t limit_bytes);
  // Returns when everything that has been recorded is in the file. Does nothing when none is recorded.
  void stop();
  void abandon_after_fork() noexcept;

  bool on() const { return on_.load(std::memory_order_acquire); }  // then ring_ is there
  bool marks_cycles() const { return marks_cycles_.load(std::memory_order_relaxed); }

  uint64_t next_unit() { return units_.fetch_add(1, std::memory_order_relaxed); }

  // Puts a record into the ring. The caller has asked on().
  void record(const TraceRecord& record, std::string_view text = {});

  static int64_t nanoseconds(Clock::time_point time) {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
  }
  static int64_t now() { return nanoseconds(Clock::now()); }

 private:
  void thread_main();
  void drain();

  const int rank_;
  const int size_;
  std::atomic<bool> on_{false};
  std::atomic<bool> marks_cycles_{false};
  std::atomic<uint64_t> units_{1};

  // Made by the first start(), and kept until the end: a thread that has seen on() may come late.
  std::unique_ptr<TraceRing> ring_;
  enum class Sleep : uint8_t { kAwake, kUntilNext, kUntilFull };  // what the thread waits for
  std::atomic<uint32_t> bell_{0};                                 // counts wake-ups of the thread
  std::atomic<Sleep> sleep_{Sleep::kAwake};
  std::atomic<bool> stopping_{false};

  std::mutex mutex_;
  std::unique_ptr<TimelineWriter> writer_;  // the thread's while it runs
  std::thread thread_;
};

}  // namespace fusewire
