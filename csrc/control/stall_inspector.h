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

  // Note [Probes]
  // Half a second before a report or an abort is due, the ranks that it will name are asked what they do. Who has not
  // answered by then is stopped, swapping or inside of a collective; the report says so and is not delayed by it.
  //
  // The ranks to ask now; empty: none.
  std::vector<int> probe(const Watched& watched, TimePoint now);
  void answered(int rank, std::string activity);

  // When a probe, a report or an abort is due next, exactly; nullopt: never, as things stand.
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
  struct Probe {
    bool asked = false;
    std::string answer;
  };
  struct Late {
    std::vector<const Unit*> units;  // what is waited for
    std::vector<int> ranks;          // by whom it has not been submitted
  };
  struct LastAnnounced {
    std::string name;  // empty: nothing yet
    TimePoint when;
  };

  static std::optional<Duration> interval(double seconds);
  static std::optional<TimePoint> oldest(const Watched& watched);
  std::optional<TimePoint> next_say(const Watched& watched) const;  // report or abort
  Duration patience() const;
  Late late(const Watched& watched, Duration age, TimePoint now) const;
  std::string describe_activity(int rank) const;
  Verdict describe(const Watched& watched, Duration age, TimePoint now) const;
  std::string describe_late_rank(int rank, const std::vector<const Unit*>& units, TimePoint now) const;

  std::optional<Duration> check_;
  std::optional<Duration> abort_;
  std::optional<TimePoint> last_report_;
  std::optional<TimePoint> probed_for_;  // what has been asked will be said then
  std::vector<Probe> probes_;            // by rank
  std::vector<LastAnnounced> announced_;
};

}  // namespace fusewire
