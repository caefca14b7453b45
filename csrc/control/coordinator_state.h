// What the root knows while it negotiates. coordinator_requests.cc takes in what ranks say, coordinator_responses.cc
// decides what they are told; coordinator.cc deals with what does not come: ranks that leave, and time that passes.
#pragma once

#include <algorithm>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "control/coordinator.h"
#include "control/fusion_planner.h"
#include "control/process_set_table.h"
#include "control/rank_set.h"
#include "control/response_cache.h"
#include "control/stall_inspector.h"
#include "control/unit.h"

namespace fusewire {

// The life of a unit at the root:
//
//   request() -> submit()     one of its parties is ready for it           kIdle -> kPending
//             -> agreed()     the last party is, or joins; it takes its    kPending -> kReady, or an error
//                             place in the one global order (FusionPlanner)
//   respond() -> answer()     its bucket goes into a response              kReady -> kIdle, or forgotten
//
// Note [Debts]
// When a mismatch is answered before everybody has submitted the unit (its stall time was over), the late members owe
// a submission that would meet nobody: the others have raised already. It is settled without them. A participant that
// learns of the error remembers it and raises it from its own next submit; a submission that was on its way at that
// moment is recognised here, because its message acknowledges only responses before the error, and is dropped, because
// the participant will fail it when it learns of the error. Who joins owes nothing any more.
struct Coordinator::Impl {
  struct Debt {
    uint32_t set;
    std::string name;
    uint64_t sequence;  // of the response with the error
    RankSet debtors;
  };
  struct Lost {
    bool clean;
    std::string reason;
  };

  Impl(int ranks, const Config& config)
      : size(ranks),
        sets(ranks),
        cache(std::max<int64_t>(config.cache_capacity, 0), ranks),
        planner(config.fusion_threshold),
        inspector(ranks, config),
        joined(ranks),
        departed(ranks),
        departures(static_cast<size_t>(ranks)) {}

  const int size;
  ProcessSetTable sets;
  UnitTable units;
  ResponseCache cache;
  FusionPlanner planner;
  StallInspector inspector;
  WaitingUnits waiting;
  uint64_t sequence = 0;  // of the last response
  TimePoint now{};

  AnnouncedCallback announced;

  std::vector<ResponseError> errors;  // for the next response
  std::vector<std::string> reports;
  std::vector<int> probes;  // for the next response
  std::vector<Debt> debts;

  // Note [Joining]
  RankSet joined;
  int last_joined = -1;
  Unit* join = nullptr;  // while some ranks have joined and others have not

  RankSet departed;
  bool anyone_departed = false;
  std::vector<Lost> departures;  // by rank
  int crashed = -1;              // a rank that left without a goodbye while nobody needed it

  std::optional<ResponseError> fatal;
  bool answer_fatal = false;

  StallInspector::Watched watched() const { return {waiting, planner, joined}; }
  void advance(TimePoint time) { now = std::max(now, time); }

  // coordinator.cc
  void fail(ErrorCode code, int rank, std::string message, const Unit* unit = nullptr);
  void violation(int rank, const std::string& what);
  void fail_lost(int rank, const Unit* unit);
  void leave(int rank, bool clean, const std::string& reason);
  void tick();

  // coordinator_requests.cc
  void receive(int rank, RequestList&& message);
  void request(int rank, Request&& request);
  void submit(Unit& unit, const ProcessSet& set, int rank, const DescriptionPtr& description, const Request& request);
  void begin(Unit& unit, const ProcessSet& set, const DescriptionPtr& description, const Request& request);
  void bring(Unit& unit, int rank, const std::vector<int64_t>& extents);
  void excuse(int rank);
  void put_off_join();
  bool settles_debt(int rank, uint32_t set, std::string_view name);
  void forgive(int rank, uint64_t acked);

  // coordinator_responses.cc
  void agreed(Unit& unit);
  void all_joined(Unit& unit);
  void change_sets(Unit& unit);
  void remove_set(uint32_t set);
  void fail_unit(Unit& unit, ErrorCode code, std::string message, int rank = -1);
  std::optional<ResponseList> respond();
  ResponseBucket describe(const PlannedBucket& planned);
  ResponseUnit answer(Unit& unit);
  bool make_room();
  void rest(Unit& unit);
  void forget(Unit& unit);
};

}  // namespace fusewire
