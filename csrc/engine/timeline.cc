#include "engine/timeline.h"

#include <unistd.h>

#include <optional>
#include <string>

#include "common/error.h"
#include "common/futex.h"
#include "common/thread.h"
#include "engine/timeline_writer.h"

namespace fusewire {
namespace {

constexpr size_t kCells = size_t{1} << 15;             // 2 MiB
constexpr std::chrono::milliseconds kWriteEvery{100};  // while there is something to write

std::string process_name(int rank, int size) {
  char host[256] = "?";
  ::gethostname(host, sizeof host - 1);
  return "rank " + std::to_string(rank) + " of " + std::to_string(size) + " (" + host + ", pid " +
         std::to_string(::getpid()) + ")";
}

}  // namespace

std::string timeline_path(const std::string& path, int rank, int size) {
  constexpr std::string_view kMark = "{rank}";
  const std::string number = std::to_string(rank);
  if (const size_t mark = path.find(kMark); mark != std::string::npos) {
    return path.substr(0, mark) + number + timeline_path(path.substr(mark + kMark.size()), rank, 1);
  }
  if (size == 1) return path;
  const size_t slash = path.rfind('/');
  const size_t dot = path.rfind('.');
  const bool extension = dot != std::string::npos && dot > 0 && (slash == std::string::npos || dot > slash + 1);
  return extension ? path.substr(0, dot) + "." + number + path.substr(dot) : path + "." + number;
}

Timeline::Timeline(int rank, int size) : rank_(rank), size_(size) {}
Timeline::~Timeline() { stop(); }

void Timeline::start(const std::string& path, bool mark_cycles, int64_t limit_bytes) {
  const std::lock_guard lock(mutex_);
  if (writer_) {
    throw Error(ErrorCode::kInvalidArgument,
                "a timeline is being recorded to '" + writer_->path() + "'; call stop_timeline() first");
  }
  writer_ = std::make_unique<TimelineWriter>(timeline_path(path, rank_, size_), rank_, process_name(rank_, size_),
                                             limit_bytes);
  if (!ring_) ring_ = std::make_unique<TraceRing>(kCells);
  stopping_.store(false);
  try {
    thread_ = start_thread("fw-trace", [this] { thread_main(); });
  } catch (...) {
    writer_.reset();
    throw;
  }
  marks_cycles_.store(mark_cycles, std::memory_order_relaxed);
  on_.store(true, std::memory_order_release);
}

void Timeline::stop() {
  const std::lock_guard lock(mutex_);
  if (!writer_) return;
  on_.store(false, std::memory_order_release);
  marks_cycles_.store(false, std::memory_order_relaxed);
  stopping_.store(true);
  bell_.fetch_add(1);
  futex_wake(bell_, 1);
  thread_.join();
  writer_->finish();
  writer_.reset();
}

void Timeline::record(const TraceRecord& record, std::string_view text) {
  const size_t used = ring_->push(record, text);
  const Sleep sleep = sleep_.load(std::memory_order_seq_cst);
  const bool full = used == 0 || used >= ring_->cells() / 2;
  if (sleep == Sleep::kAwake || (sleep == Sleep::kUntilFull && !full)) return;
  if (sleep_.exchange(Sleep::kAwake) == Sleep::kAwake) return;
  bell_.fetch_add(1);
  futex_wake(bell_, 1);
}

void Timeline::drain() {
  TraceRecord record;
  std::string text;
  while (ring_->pop(record, text)) writer_->write(record, text);
  if (const uint64_t lost = ring_->take_dropped()) writer_->lost(lost);
  if (!writer_->flush()) on_.store(false, std::memory_order_relaxed);
}

// With nothing to write it sleeps until there is something; what follows within kWriteEvery is written together with
// it.
void Timeline::thread_main() {
  const auto sleep = [this](Sleep until, std::optional<std::chrono::nanoseconds> at_most) {
    const uint32_t bell = bell_.load();
    sleep_.store(until, std::memory_order_seq_cst);
    if (!stopping_.load() && (until == Sleep::kUntilFull || ring_->empty())) futex_wait(bell_, bell, at_most);
    sleep_.store(Sleep::kAwake);
  };
  while (!stopping_.load()) {
    if (ring_->empty()) sleep(Sleep::kUntilNext, std::nullopt);
    sleep(Sleep::kUntilFull, kWriteEvery);
    drain();
  }
  drain();
}

void Timeline::abandon_after_fork() noexcept {
  on_.store(false, std::memory_order_relaxed);
  if (writer_) writer_->abandon();
}

}  // namespace fusewire
