// A whole job's negotiation in one thread: n participants and the coordinator, joined by queues of encoded messages
// that a seeded generator delivers in any order the real thing could. A finished bucket is reported only when the
// simulation decides so. Time stands still until it is moved.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstddef>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "control/coordinator.h"
#include "control/participant.h"
#include "control/wire.h"

namespace fusewire {

// "t3"
template <typename Integer>
std::string numbered(std::string stem, Integer number) {
  return stem.append(std::to_string(number));
}

inline UnitSpec make_unit(const std::string& name, Dims shape = {4}, DataType dtype = DataType::kFloat32) {
  UnitSpec spec;
  spec.name = name;
  spec.tensors.push_back({dtype, dtype, DeviceType::kCpu, std::move(shape)});
  return spec;
}

inline UnitSpec make_group(const std::string& name, size_t tensors, Dims shape = {4}) {
  UnitSpec spec = make_unit(name, shape);
  spec.tensors.resize(tensors, spec.tensors.front());
  return spec;
}

// With extents: an allgather or an alltoall of tensors [?, 2].
inline UnitSpec make_uneven(OpKind kind, const std::string& name, size_t tensors = 1) {
  UnitSpec spec = make_group(name, tensors, {-1, 2});
  spec.kind = kind;
  return spec;
}

inline UnitSpec make_set(const std::string& name, std::vector<int32_t> ranks) {
  UnitSpec spec;
  spec.kind = OpKind::kAddProcessSet;
  spec.name = name;
  spec.ranks = std::move(ranks);
  return spec;
}

inline UnitSpec make_removal(const std::string& name, uint32_t set) {
  UnitSpec spec;
  spec.kind = OpKind::kRemoveProcessSet;
  spec.name = name;
  spec.process_set = set;
  return spec;
}

inline UnitSpec make_join() {
  UnitSpec spec;
  spec.kind = OpKind::kJoin;
  spec.name = kJoinName;
  return spec;
}

inline UnitSpec make_adoption(std::vector<int32_t> ranks) {
  UnitSpec spec;
  spec.kind = OpKind::kAdoptProcessSet;
  spec.name = adoption_name(ranks);
  spec.ranks = std::move(ranks);
  return spec;
}

class Simulation {
 public:
  // What one rank has been told to run.
  struct Ran {
    uint64_t bucket = 0;
    uint32_t process_set = 0;
    bool skip = false;
    std::vector<std::string> names;
    std::vector<std::vector<bool>> skipped;
    std::vector<std::vector<int64_t>> extents;
    uint32_t created_set = 0;   // of the last unit
    std::vector<bool> unasked;  // taken part in without having submitted it
    bool operator==(const Ran&) const = default;
    // The same bucket, whether or not the rank had asked for it.
    bool same_bucket(const Ran& other) const {
      Ran copy = other;
      copy.unasked = unasked;
      return copy == *this;
    }
  };
  struct Failed {
    std::string name;
    ErrorCode code;
    int rank;
    std::string message;
    size_t after = 0;  // how many buckets the rank had run
    bool operator==(const Failed& other) const {
      return name == other.name && code == other.code && rank == other.rank && message == other.message;
    }
  };
  struct Rank {
    std::unique_ptr<Participant> participant;
    std::map<UnitToken, std::string> tokens;  // in flight
    std::deque<std::vector<std::byte>> up;    // on their way to the root
    std::deque<std::vector<std::byte>> down;
    std::deque<uint64_t> running;  // buckets it will have to report
    bool here = true;

    std::vector<Ran> ran;
    std::vector<Failed> failed;
    std::optional<ResponseError> fatal;
    int probes = 0;            // how often the root has asked what it does
    size_t id_requests = 0;    // announced by a cache id
    size_t full_requests = 0;  // announced in full
  };

  Simulation(int size, const Config& config, unsigned seed = 1) : coordinator(size, config), random(seed) {
    for (int rank = 0; rank < size; ++rank) {
      ranks.emplace_back().participant = std::make_unique<Participant>(rank, size);
    }
  }

  int size() const { return static_cast<int>(ranks.size()); }
  Rank& operator[](int rank) { return ranks[static_cast<size_t>(rank)]; }

  void submit(int rank, const UnitSpec& spec, std::vector<bool> absent = {}, std::vector<int64_t> extents = {}) {
    Rank& at = (*this)[rank];
    at.participant->submit(spec, std::move(absent), ++next_token, std::move(extents));
    at.tokens[next_token] = spec.name;
  }
  void submit_everywhere(const UnitSpec& spec, const std::vector<bool>& absent = {},
                         const std::vector<int64_t>& extents = {}) {
    for (int rank = 0; rank < size(); ++rank) submit(rank, spec, absent, extents);
  }

  // One thing that can happen next, if any can: a rank sends, a message arrives, the root answers (with `lazy_root` it
  // may read several messages first), a bucket is reported complete.
  bool step() {
    std::vector<std::pair<int, int>> possible;
    for (int rank = 0; rank < size(); ++rank) {
      Rank& at = (*this)[rank];
      if (!at.here || rank == silent) continue;
      if (at.participant->has_outgoing()) possible.emplace_back(rank, 0);
      if (!at.up.empty()) possible.emplace_back(rank, 1);
      if (!at.down.empty()) possible.emplace_back(rank, 2);
      if (!at.running.empty() && !hold_completions) possible.emplace_back(rank, 3);
    }
    if (unanswered) possible.emplace_back(0, 4);
    if (possible.empty()) return false;
    const auto [rank, what] = possible[random() % possible.size()];
    if (what == 0) send(rank);
    if (what == 1) deliver_up(rank);
    if (what == 2) deliver_down(rank);
    if (what == 3) complete(rank);
    if (what == 4) broadcast();
    return true;
  }
  void run() {
    while (step()) {
    }
  }
  void run_without(int rank) {
    silent = rank;
    run();
    silent = -1;
  }
  void some_steps(int most) {
    for (int n = static_cast<int>(random() % static_cast<unsigned>(most + 1)); n > 0 && step(); --n) {
    }
  }

  void send(int rank) {
    Rank& at = (*this)[rank];
    const RequestList list = at.participant->take_outgoing();
    for (const Request& request : list.requests) ++(request.spec ? at.full_requests : at.id_requests);
    at.up.push_back(encode(list));
  }
  void deliver_up(int rank) {
    Rank& at = (*this)[rank];
    const auto frame = std::move(at.up.front());
    at.up.pop_front();
    coordinator.receive(rank, decode_requests(frame), now);
    unanswered = true;
    if (!lazy_root) broadcast();
  }
  void deliver_down(int rank) {
    Rank& at = (*this)[rank];
    const ResponseList response = decode_responses(at.down.front());
    at.down.pop_front();
    Participant::Outcome outcome = at.participant->apply(response);
    for (const Work& work : outcome.work) {
      Ran& ran = at.ran.emplace_back();
      ran.bucket = work.bucket;
      ran.process_set = work.process_set;
      ran.skip = work.skip;
      for (const WorkUnit& unit : work.units) {
        ran.names.push_back(unit.unasked ? unit.unasked->name : take_name(at, unit.token));
        ran.unasked.push_back(unit.unasked != nullptr);
        ran.skipped.push_back(unit.skipped);
        ran.extents.push_back(unit.extents);
        ran.created_set = unit.created_set;
      }
      if (work.report_completion) at.running.push_back(work.bucket);
    }
    for (const Failure& failure : outcome.failures) {
      at.failed.push_back({take_name(at, failure.token), failure.code, failure.rank, failure.message, at.ran.size()});
    }
    if (outcome.fatal) at.fatal = outcome.fatal;
    if (outcome.probed) {
      ++at.probes;
      if (answers_probes) at.participant->tell_activity("rank " + std::to_string(rank) + " reads data\nline two");
    }
  }
  void complete(int rank) {
    Rank& at = (*this)[rank];
    at.participant->completed(at.running.front());
    at.running.pop_front();
  }
  void leave(int rank, bool clean, const std::string& reason) {
    Rank& at = (*this)[rank];
    while (at.here && !at.up.empty()) deliver_up(rank);
    at.here = false;
    coordinator.leave(rank, clean, reason, now);
    broadcast();
  }

  // Moves time, calling tick exactly when the coordinator asks for it.
  void advance(std::chrono::milliseconds duration) {
    const TimePoint end = now + duration;
    for (auto deadline = coordinator.next_deadline(); deadline && *deadline <= end;
         deadline = coordinator.next_deadline()) {
      now = std::max(now, *deadline);
      ++ticks;
      coordinator.tick(now);
      broadcast();
      if (delivers_probes) run();
      for (std::string& report : coordinator.take_reports()) reports.emplace_back(now, std::move(report));
    }
    now = end;
  }

  // Names of the units a rank has run, in order.
  std::vector<std::string> order(int rank) {
    std::vector<std::string> names;
    for (const Ran& ran : (*this)[rank].ran) names.insert(names.end(), ran.names.begin(), ran.names.end());
    return names;
  }
  void forget_results() {
    for (Rank& rank : ranks) {
      rank.ran.clear();
      rank.failed.clear();
      rank.id_requests = rank.full_requests = 0;
    }
  }
  void expect_idle() {
    for (int rank = 0; rank < size(); ++rank) {
      EXPECT_EQ((*this)[rank].participant->pending(), 0u) << "rank " << rank;
      EXPECT_TRUE((*this)[rank].tokens.empty()) << "rank " << rank;
    }
    EXPECT_FALSE(coordinator.next_deadline().has_value());
  }

  Coordinator coordinator;
  std::vector<Rank> ranks;
  std::mt19937 random;
  TimePoint now{std::chrono::hours(1)};
  bool hold_completions = false;
  bool lazy_root = false;
  bool answers_probes = true;
  bool delivers_probes = false;  // while time moves: what the root asks then is heard and answered at once
  int silent = -1;               // a rank that does nothing for now
  bool unanswered = false;
  UnitToken next_token = 0;
  size_t responses = 0;
  size_t response_bytes = 0;
  int ticks = 0;
  std::vector<std::pair<TimePoint, std::string>> reports;

 private:
  static std::string take_name(Rank& at, UnitToken token) {
    const auto found = at.tokens.find(token);
    if (found == at.tokens.end()) {
      ADD_FAILURE() << "unit " << token << " ended twice or never began";
      return {};
    }
    std::string name = std::move(found->second);
    at.tokens.erase(found);
    return name;
  }

  void broadcast() {
    unanswered = false;
    while (const auto response = coordinator.poll(now)) {
      ++responses;
      const auto frame = encode(*response);
      response_bytes += frame.size();
      for (Rank& rank : ranks) {
        if (rank.here) rank.down.push_back(frame);
      }
    }
  }
};

}  // namespace fusewire
