// From records to trace events: which lane, which span, which arguments. One thread's.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "common/chunk_trace.h"
#include "engine/timeline_file.h"
#include "engine/trace_ring.h"

namespace fusewire {

// Note [Lanes]
// A rank is a process of the trace, with these threads: "cycles"; "buckets" per process set, where a bucket's span
// holds the data plane's steps chunk by chunk; and a lane per tensor name, where negotiate, queue and the collective
// follow each other and the collective holds the steps of those chunks that have a part of the tensor. Spans that are
// open while the job hangs or dies are begun in the file, because each is written as a begin and an end. Units without
// a name of their own, and those beyond kMostLanes names, share lanes, one unit at a time.
class TimelineWriter {
 public:
  // `process`: what the rank is called in the trace.
  TimelineWriter(const std::string& path, int rank, const std::string& process, int64_t limit_bytes);

  void write(const TraceRecord& record, std::string_view text);
  void lost(uint64_t records);
  bool flush();  // false: nothing more is written, because the limit is reached or the file cannot be written
  void finish() { file_.finish(); }
  void abandon() noexcept { file_.abandon(); }
  const std::string& path() const { return file_.path(); }

 private:
  static constexpr size_t kMostLanes = 4096;
  static constexpr int kMostChunksShown = 64;  // per tensor and bucket; the totals count all

  struct Lane {
    int thread = 0;
    bool busy = false;
  };
  struct Unit {
    Lane* lane = nullptr;
    std::string name;  // with its process set
    std::string_view kind;
    int64_t answered = 0;
    bool negotiating = true;
  };
  struct Member {
    Unit* unit = nullptr;
    uint64_t number = 0;
    int64_t from = 0;
    int64_t to = 0;
    int chunks = 0;
    std::array<double, kChunkStepCount> totals{};  // nanoseconds
  };
  struct Bucket {
    TraceRecord record;
    int thread = 0;
    std::vector<Member> members;
    size_t announced = 0;  // members that have come, also those that are not in the trace
    size_t first = 0;      // members before it are behind the chunk in work
    std::array<double, kChunkStepCount> totals{};
    bool open = false;
  };

  void submit(const TraceRecord& record, std::string_view name);
  void announce(const TraceRecord& record, std::string_view name);
  void answer(const TraceRecord& record);
  void end(const TraceRecord& record, std::string_view failure);
  void begin_bucket(const TraceRecord& record);
  void add_member(const TraceRecord& record);
  void open_bucket();
  void chunk(const TraceRecord& record);
  void end_bucket(int64_t at, std::string_view failure);
  void on_gpu(const TraceRecord& record);
  void release(uint64_t number);

  Lane& lane_for(const std::string& name);
  int bucket_thread(uint32_t set);
  void name_thread(int thread, std::string_view name, int order);

  // For the event that is written next.
  std::string& fresh_arguments() {
    arguments_.clear();
    return arguments_;
  }
  // One event. `arguments`: the inside of a JSON object, may be empty. A span without an end has `end` < 0.
  void event(char phase, int thread, std::string_view name, int64_t begin, int64_t end, std::string_view arguments);
  void put(std::string_view event);

  const int rank_;
  const int64_t limit_;
  TimelineFile file_;
  bool stopped_ = false;
  int64_t last_ = 0;  // the latest time seen
  std::string buffer_;
  std::string arguments_;

  std::unordered_map<std::string, std::deque<Lane>> lanes_;
  std::unordered_map<uint32_t, int> bucket_threads_;
  int next_thread_ = 0;
  size_t lane_count_ = 0;
  std::unordered_map<uint64_t, Unit> units_;
  std::unordered_map<std::string, uint64_t> by_name_;  // units being negotiated
  Bucket bucket_;
  bool gpu_named_ = false;
};

}  // namespace fusewire
