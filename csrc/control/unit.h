// The root's record of one unit, alive while the unit is cached, awaited, or on its way out.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "control/intrusive_list.h"
#include "control/message.h"
#include "control/process_set_table.h"
#include "control/time_point.h"

namespace fusewire {

// Units with equal keys (and process set) may share a bucket.
struct FuseKey : Operation {
  DataType dtype = DataType::kFloat32;
  DataType wire = DataType::kFloat32;
  DeviceType device = DeviceType::kCpu;
  bool operator==(const FuseKey&) const = default;
};

// What is worked out once per description instead of once per step.
struct Description {
  explicit Description(UnitSpec unit);
  UnitSpec spec;
  FuseKey key;
  bool fusible = false;  // one dtype, one device, a kind that moves data
  bool cacheable = false;
  int64_t bytes = 0;  // in the wire type; 0 where that depends on the extents
};
using DescriptionPtr = std::shared_ptr<const Description>;

// What is wrong with a description in itself, as a phrase; empty: nothing.
std::string flaw_of(const UnitSpec& spec);

// What is wrong with the extents (and absent bits) that a rank of a set with `members` ranks sends along.
std::string flaw_of(const UnitSpec& spec, const std::vector<int64_t>& extents, size_t members);

// Bytes of a unit with extents, given all members', as a data plane sees them: the whole result of an allgather, an
// average member's of an alltoall. nullopt: more than anybody can count.
std::optional<int64_t> payload(const UnitSpec& spec, const std::vector<int64_t>& extents, size_t members);

// Whether two ranks mean the same: equality, except that a NaN scale equals itself.
bool agree(const UnitSpec& a, const UnitSpec& b);

struct Unit {
  enum class State : uint8_t {
    kIdle,     // only cached
    kPending,  // some parties have submitted it
    kReady,    // all have, or have joined; it is with the planner
  };

  // Ranks whose description is not `proposed`.
  struct Dissent {
    DescriptionPtr description;
    std::vector<int> ranks;
  };

  const Description& description() const { return proposed ? *proposed : *cached; }
  const std::string& name() const { return description().spec.name; }

  uint32_t set_id = 0;  // where it is negotiated
  CacheId id = kNoCacheId;
  DescriptionPtr cached;  // what `id` stands for

  // Of the round in progress.
  State state = State::kIdle;
  bool absences = false;                       // whether a tensor is left for which everybody so far is absent
  int missing = 0;                             // parties that have neither submitted it nor joined
  DescriptionPtr proposed;                     // what the first to submit it said
  const ProcessSet* set = nullptr;             // where it is negotiated, and runs
  const ProcessSet* parties = nullptr;         // who is to submit it: the members of `set`, or those who adopt one
  std::unique_ptr<const ProcessSet> adopters;  // `parties` of an adoption
  RankSet submitted;
  bool incomplete = false;       // agreed without the word of some member of `set`: see Note [Joining]
  std::vector<bool> absent;      // valid while `absences`
  std::vector<int64_t> extents;  // of all members: see Note [Extents]
  std::vector<Dissent> dissents;
  TimePoint since;  // the first submission

  ListLink<Unit> waiting;  // among the pending ones, oldest first
  ListLink<Unit> idle;     // among the cached ones, least recently used first
};

using WaitingUnits = IntrusiveList<Unit, &Unit::waiting>;
using IdleUnits = IntrusiveList<Unit, &Unit::idle>;

// Hashing of names that allows look-ups by string_view.
struct NameHash {
  using is_transparent = void;
  size_t operator()(std::string_view name) const { return std::hash<std::string_view>{}(name); }
};
template <typename T>
using NameMap = std::unordered_map<std::string, T, NameHash, std::equal_to<>>;

// Units by (process set, name). Addresses are stable.
class UnitTable {
 public:
  Unit& find_or_create(uint32_t set, const std::string& name);
  void erase(Unit* unit);
  std::vector<Unit*> in_set(uint32_t set);

 private:
  std::unordered_map<uint32_t, NameMap<Unit>> sets_;
};

}  // namespace fusewire
