// Notices that a unit waits for ranks that do not come, or that a bucket does not end, and says who keeps whom waiting.
#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "common/config.h"
#include "control/fusion_planner.h"
#include "control/unit.h"

namespace fusewire {

class StallInspector {
 public:
  StallInspector(int size, const Config& config);

  // The last of what `rank` has just announced.
  void announced(int rank, const std::string& name, TimePoint now);

  // What is watched: units that wait for ranks which have not joined, and buckets that run.
  struct Watched {
    const WaitingUnits& waiting;
    const FusionPlanner& planner;
    const RankSet& joined;
  };

  // When a report or an abort is due next, exactly; nullopt: never, as things stand.
  std::optional<TimePoint> next_deadline(const Watched& watched) const;

  // The report, if one is due; at most one per interval.
  std::optional<std::string> report(const Watched& watched, TimePoint now);

  // Whether what began at `since` has outlived the abort time.
  bool expired(TimePoint since, TimePoint now) const { return abort_ && since + *abort_ <= now; }

  struct Verdict {
    std::string message;
    int rank = -1;  // the late rank, if there is a single one
  };
  // Why the job is given up. Call when something has expired.
  Verdict verdict(const Watched& watched, TimePoint now) const;

 private:
  using Duration = TimePoint::duration;
  struct LastAnnounced {
    std::string name;  // empty: nothing yet
    TimePoint when;
  };

  static std::optional<Duration> interval(double seconds);
  static std::optional<TimePoint> oldest(const Watched& watched);
  Verdict describe(const Watched& watched, Duration age, TimePoint now) const;
  std::string describe_late_rank(int rank, const std::vector<const Unit*>& units, TimePoint now) const;

  std::optional<Duration> check_;
  std::optional<Duration> abort_;
  std::optional<TimePoint> last_report_;
  std::vector<LastAnnounced> announced_;
};

}  // namespace fusewire
