#include "control/stall_inspector.h"

#include <algorithm>
#include <cstdio>
#include <utility>

namespace fusewire {
namespace {

constexpr size_t kNamesShown = 8;
constexpr size_t kRanksShown = 8;
constexpr std::chrono::milliseconds kPatience{500};
constexpr size_t kBucketsShown = 4;

std::string seconds(TimePoint::duration duration) {
  char text[32];
  const double value = std::chrono::duration<double>(duration).count();
  std::snprintf(text, sizeof text, value < 10 ? "%.1f s" : "%.0f s", value);
  return text;
}

std::string quoted(const std::string& name) { return "'" + name + "'"; }

}  // namespace

StallInspector::StallInspector(int size, const Config& config)
    : check_(interval(config.stall_check_seconds)),
      abort_(interval(config.stall_abort_seconds)),
      probes_(static_cast<size_t>(size)),
      announced_(static_cast<size_t>(size)) {}

std::optional<StallInspector::Duration> StallInspector::interval(double seconds) {
  constexpr double kForEver = 1e9;  // 30 years; larger values would overflow a time point
  if (!(seconds > 0) || seconds > kForEver) return std::nullopt;
  return std::chrono::duration_cast<Duration>(std::chrono::duration<double>(seconds));
}

void StallInspector::announced(int rank, const std::string& name, TimePoint now) {
  LastAnnounced& last = announced_[static_cast<size_t>(rank)];
  last.name = name;
  last.when = now;
}

std::optional<TimePoint> StallInspector::oldest(const Watched& watched) {
  std::optional<TimePoint> since;
  if (const Unit* unit = watched.waiting.front()) since = unit->since;
  const auto& running = watched.planner.running();
  if (!running.empty() && (!since || running.begin()->second.since < *since)) since = running.begin()->second.since;
  return since;
}

// Of the shortest interval a quarter, so that tests with short ones work, too.
StallInspector::Duration StallInspector::patience() const {
  Duration shortest = kPatience * 4;
  if (check_) shortest = std::min(shortest, *check_);
  if (abort_) shortest = std::min(shortest, *abort_);
  return shortest / 4;
}

std::optional<TimePoint> StallInspector::next_deadline(const Watched& watched) const {
  const std::optional<TimePoint> say = next_say(watched);
  return !say || probed_for_ == say ? say : *say - patience();
}

std::vector<int> StallInspector::probe(const Watched& watched, TimePoint now) {
  const std::optional<TimePoint> say = next_say(watched);
  if (!say || probed_for_ == say || now < *say - patience()) return {};
  probed_for_ = say;
  for (Probe& probe : probes_) probe = {};
  const Duration interval = check_ && abort_ ? std::min(*check_, *abort_) : check_.value_or(abort_.value_or(kPatience));
  std::vector<int> asked = late(watched, interval, *say).ranks;
  if (asked.empty() && !watched.planner.running().empty()) {
    asked = watched.planner.running().begin()->second.set->ranks;  // one of them is inside of the bucket and waits
  }
  if (asked.size() > kRanksShown) asked.resize(kRanksShown);
  for (const int rank : asked) probes_[static_cast<size_t>(rank)].asked = true;
  return asked;
}

void StallInspector::answered(int rank, std::string activity) {
  Probe& probe = probes_[static_cast<size_t>(rank)];
  if (probe.asked) probe.answer = std::move(activity);
}

// Indented below the line about the rank.
std::string StallInspector::describe_activity(int rank) const {
  const Probe& probe = probes_[static_cast<size_t>(rank)];
  if (!probe.asked) return {};
  const std::string who = "rank " + std::to_string(rank);
  if (probe.answer.empty()) {
    return "\n  " + who + " did not answer when it was asked what it does: it is stopped, swapping or inside of a " +
           "collective";
  }
  std::string text = "\n  what " + who + " does:";
  for (size_t begin = 0; begin < probe.answer.size();) {
    const size_t end = std::min(probe.answer.find('\n', begin), probe.answer.size());
    if (end > begin) text += "\n    " + probe.answer.substr(begin, end - begin);
    begin = end + 1;
  }
  return text;
}

std::optional<TimePoint> StallInspector::next_say(const Watched& watched) const {
  const std::optional<TimePoint> since = oldest(watched);
  if (!since) return std::nullopt;
  std::optional<TimePoint> deadline;
  if (check_) {
    deadline = *since + *check_;
    if (last_report_) deadline = std::max(*deadline, *last_report_ + *check_);
  }
  if (abort_) deadline = deadline ? std::min(*deadline, *since + *abort_) : *since + *abort_;
  return deadline;
}

std::optional<std::string> StallInspector::report(const Watched& watched, TimePoint now) {
  const std::optional<TimePoint> since = oldest(watched);
  if (!check_ || !since || *since + *check_ > now) return std::nullopt;
  if (last_report_ && *last_report_ + *check_ > now) return std::nullopt;
  last_report_ = now;
  std::string text = describe(watched, *check_, now).message;
  if (!abort_) return text;
  return text + "\nall ranks give up when something has waited for " + seconds(*abort_);
}

StallInspector::Verdict StallInspector::verdict(const Watched& watched, TimePoint now) const {
  Verdict verdict = describe(watched, abort_.value_or(Duration::zero()), now);
  verdict.message = "gave up after " + seconds(abort_.value_or(Duration::zero())) + ": " + verdict.message;
  return verdict;
}

StallInspector::Late StallInspector::late(const Watched& watched, Duration age, TimePoint now) const {
  Late found;
  std::vector<const Unit*>& units = found.units;
  RankSet late_set(static_cast<int>(announced_.size()));
  const Unit* join = nullptr;
  for (const Unit* unit = watched.waiting.front(); unit != nullptr && unit->since + age <= now;
       unit = WaitingUnits::next(unit)) {
    if (unit->proposed->spec.kind == OpKind::kJoin) {
      join = unit;
    } else {
      units.push_back(unit);
    }
  }
  // Who waits for something else cannot join.
  if (join != nullptr && units.empty() && watched.planner.running().empty()) units.push_back(join);
  for (const Unit* unit : units) {
    for (const int rank : unit->parties->ranks) {
      if (!unit->submitted.contains(rank) && !watched.joined.contains(rank)) late_set.insert(rank);
    }
  }
  for (int rank = 0; rank < static_cast<int>(announced_.size()); ++rank) {
    if (late_set.contains(rank)) found.ranks.push_back(rank);
  }
  return found;
}

StallInspector::Verdict StallInspector::describe(const Watched& watched, Duration age, TimePoint now) const {
  const auto [units, late] = this->late(watched, age, now);
  std::vector<std::string> lines;
  for (size_t i = 0; i < late.size() && i < kRanksShown; ++i) {
    lines.push_back(describe_late_rank(late[i], units, now) + describe_activity(late[i]));
  }
  if (late.size() > kRanksShown) {
    lines.push_back(rank_list({late.begin() + kRanksShown, late.end()}) +
                    (late.size() == kRanksShown + 1 ? " is late, too" : " are late, too"));
  }
  size_t buckets = 0;
  for (const auto& [number, bucket] : watched.planner.running()) {
    if (bucket.since + age > now) break;
    if (++buckets > kBucketsShown) continue;
    std::string line = "bucket " + std::to_string(number) + " (" + quoted(bucket.first_unit);
    if (bucket.units > 1) line += " and " + std::to_string(bucket.units - 1) + " more";
    lines.push_back(line + ") was agreed on " + seconds(now - bucket.since) + " ago, and rank " +
                    std::to_string(bucket.set->first()) + " has not reported that it has run");
  }
  if (buckets > kBucketsShown) lines.push_back(std::to_string(buckets - kBucketsShown) + " more buckets run as long");
  if (late.empty()) {
    for (int rank = 0; rank < static_cast<int>(probes_.size()); ++rank) {
      const std::string activity = describe_activity(rank);
      if (!activity.empty()) lines.push_back(activity.substr(1));
    }
  }

  Verdict verdict;
  for (const std::string& line : lines) {
    if (!verdict.message.empty()) verdict.message += "\n";
    verdict.message += line;
  }
  if (late.size() == 1) verdict.rank = late.front();
  return verdict;
}

std::string StallInspector::describe_late_rank(int rank, const std::vector<const Unit*>& units, TimePoint now) const {
  std::string names;
  size_t count = 0;
  const Unit* unnamed = nullptr;
  TimePoint since = now;
  RankSet waiting_set(static_cast<int>(announced_.size()));
  for (const Unit* unit : units) {
    if (!unit->parties->contains(rank) || unit->submitted.contains(rank)) continue;
    since = std::min(since, unit->since);
    if (unnamed == nullptr && unit->name().find(kUnnamedMark) != std::string::npos) unnamed = unit;
    for (const int member : unit->parties->ranks) {
      if (unit->submitted.contains(member)) waiting_set.insert(member);
    }
    if (++count > kNamesShown) continue;
    if (count > 1) names += ", ";
    names += quoted(unit->name());
  }
  if (count > kNamesShown) names += " and " + std::to_string(count - kNamesShown) + " more";
  std::vector<int> waiting;
  for (int member = 0; member < static_cast<int>(announced_.size()); ++member) {
    if (waiting_set.contains(member)) waiting.push_back(member);
  }

  const std::string who = "rank " + std::to_string(rank);
  const std::string others = rank_list(waiting);
  const LastAnnounced& last = announced_[static_cast<size_t>(rank)];
  std::string text = who + " has not submitted " + names + "; " + others +
                     (waiting.size() == 1 ? " has waited for " : " have waited for ") + seconds(now - since) + "; " +
                     who + " last submitted ";
  text += last.name.empty() ? "nothing yet" : quoted(last.name) + " " + seconds(now - last.when) + " ago";
  if (unnamed != nullptr) {
    text += "; " + quoted(unnamed->name()) + " was given no name: unnamed calls are matched by their count, and the " +
            "counts differ: " + who + " has made fewer of them than " + others;
  }
  return text;
}

}  // namespace fusewire
