// What a Participant knows, shared by its two halves: participant.cc, which takes in this rank's units and what the
// root is told of them, and participant_responses.cc, which does what the root says.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "control/participant.h"
#include "control/process_set_table.h"
#include "control/unit.h"

namespace fusewire {

// What this rank knows of one name in one process set: the description that the root holds under an id, and the unit in
// flight. Forgotten when it is neither cached nor in flight.
struct Record {
  uint32_t set = 0;
  const std::string* name = nullptr;  // the key it is stored under

  CacheId id = kNoCacheId;
  std::unique_ptr<UnitSpec> cached;  // what `id` stands for

  bool in_flight = false;
  UnitToken token = 0;
  std::unique_ptr<UnitSpec> fresh;  // the unit in flight where it does not mean `cached`, else null
  uint64_t message = 0;             // the number of the outgoing message with its request, and the place in there
  size_t place = 0;

  const UnitSpec& current() const { return fresh != nullptr ? *fresh : *cached; }
};

inline std::string set_label(uint32_t set) { return "process set " + std::to_string(set); }

struct Participant::Impl {
  // See Note [Debts] in coordinator.cc.
  struct Debt {
    uint32_t set;
    std::string name;
    Error error;
  };

  Impl(int own_rank, int size) : rank(own_rank), sets(size), records(1) {}

  const int rank;
  ProcessSetTable sets;
  std::vector<NameMap<Record>> records;  // by process set, then by name
  std::vector<Record*> by_id;            // mirrors the root's slots, as far as this rank is a member
  std::vector<Debt> debts;
  size_t in_flight = 0;
  bool joined = false;     // a kJoin is in flight: see Note [Joining]
  bool abandoned = false;  // take_pending() was called: what comes now meets nothing

  uint64_t applied = 0;
  bool acknowledge = false;  // an eviction wants an answer

  // Written by the driver alone.
  std::atomic<uint64_t> hits{0};
  std::atomic<uint64_t> misses{0};
  std::atomic<uint64_t> evictions{0};
  static void count(std::atomic<uint64_t>& counter) {
    counter.store(counter.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }

  // The outgoing message.
  uint64_t message = 1;  // counts them
  bool withdrawn = false;
  std::vector<Request> requests;  // one with neither id nor description has been withdrawn
  std::vector<uint64_t> completed;
  std::optional<ResponseError> failure;
  std::optional<std::string> activity;

  const ProcessSet& check(const UnitSpec& spec) const;
  void pay_debt(uint32_t set, const std::string& name);
  void announce(Record& record, const UnitSpec& spec, std::vector<bool>&& absent, std::vector<int64_t>&& extents);

  Record* find(uint32_t set, std::string_view name);
  Record& find_or_create(uint32_t set, const std::string& name);
  bool unsent(const Record& record) const { return record.in_flight && record.message == message; }
  void withdraw(const Record& record);
  void finish(Record& record);
  void drop_if_unused(Record& record);

  void evict(CacheId id);
  void remember(Record& record, CacheId id);
  Record& answered(const ResponseBucket& bucket, size_t index);
  bool takes_part_unasked(const UnitSpec& spec) const;
  Work run(const ResponseBucket& bucket, const ProcessSet& set, Outcome& outcome);
  void change_sets(const UnitSpec& spec, WorkUnit& unit, Outcome& outcome);
  void apply_error(const ResponseError& error, bool excused, Outcome& outcome);
};

}  // namespace fusewire
