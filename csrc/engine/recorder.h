// Told by the engine of everything that happens to a unit; tells the counters, the timeline and the unit's observer.
#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "common/error.h"
#include "control/message.h"
#include "engine/observer.h"
#include "engine/stats.h"
#include "engine/timeline.h"

namespace fusewire {

struct Assignment;
struct DeviceWork;

class Recorder {
 public:
  using Clock = std::chrono::steady_clock;

  Recorder(int rank, int size) : timeline_(rank, size), chunks_(timeline_) {}

  Timeline& timeline() { return timeline_; }
  const StatsCounters& counters() const { return counters_; }

  // On the submitter's thread.
  uint64_t submitted(const UnitSpec& spec) { return timeline_.on() ? record_submission(spec) : 0; }

  // On the driver's thread. `since`: when the driver took the unit up; both times are those of its steps.
  void answered(const UnitTrace& unit, Clock::time_point since, Clock::time_point now);
  // A unit that runs nothing: it failed (why), was skipped, or moves no data.
  void ended(const UnitTrace& unit, OpKind kind, const Error* failure, bool skipped);
  // A unit that was agreed on and fails without having run. Any thread.
  void dropped(const UnitTrace& unit, const Error& failure);
  void announced(int rank, uint32_t process_set, std::string_view name) {
    if (timeline_.on()) record_announcement(rank, process_set, name);
  }
  void cycle(Clock::time_point now) {
    if (timeline_.marks_cycles()) record_cycle(now);
  }

  // On the thread that runs the bucket: before the data plane and after it. `failure` is null where all went well.
  void run_begins(Assignment& assignment);
  void run_ends(Assignment& assignment, const Error* failure, bool by_executor);

  // What a bucket has left on the GPU has ended just now; `took` is there where it was timed. On the thread that
  // follows it.
  void device_ended(const DeviceWork& work, std::optional<std::chrono::nanoseconds> took);

 private:
  class Chunks final : public ChunkTrace {
   public:
    explicit Chunks(Timeline& timeline) : timeline_(timeline) {}
    void chunk(ChunkStep step, Clock::time_point begin, Clock::time_point end, int64_t from, int64_t to) override;

   private:
    Timeline& timeline_;
  };

  void end(const UnitTrace& unit, const Error* failure);
  uint64_t record_submission(const UnitSpec& spec);
  void record_announcement(int rank, uint32_t process_set, std::string_view name);
  void record_cycle(Clock::time_point now);
  void record_bucket(Assignment& assignment);

  Timeline timeline_;
  Chunks chunks_;
  StatsCounters counters_;
  uint64_t began_ = 0;  // ticks; of the bucket that runs
};

}  // namespace fusewire
