// What ranks tell each other, as plain data. wire.h turns these into bytes and back, validating everything.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/types.h"

namespace fusewire {

// What all ranks must agree on for one tensor.
struct TensorSpec {
  DataType dtype = DataType::kFloat32;
  DataType wire = DataType::kFloat32;
  DeviceType device = DeviceType::kCpu;
  Dims shape;
  bool operator==(const TensorSpec&) const = default;
};

// Names the engine makes up for calls without one contain this ("allreduce.noname.12"). Such names never come back, so
// they get no cache id.
inline constexpr std::string_view kUnnamedMark = ".noname.";

// Note [Units]
// The unit of negotiation is one tensor or one explicit group: a group is a unit with several tensors, so it is
// all-or-nothing by construction, has one cache id, and costs the protocol no more than a single tensor. A rank may be
// absent for any tensor of a unit: one bit per tensor.
//
// Note [Changing process sets]
// kAddProcessSet and kRemoveProcessSet are submitted by every rank of the job, members or not, and are negotiated in
// the global set (names included) whatever `process_set` says. An addition lists its members in `ranks` and leaves
// `process_set` 0. A removal names its victim in `process_set`. Ids count additions and are never used again. What all
// members had submitted before the removal was agreed still runs; what waits for somebody fails with kInvalidArgument.
// kAdoptProcessSet is submitted by the ranks in `ranks` alone: its answer is the first set with exactly these members,
// which is added if there is none, on every rank. Its name follows from the ranks, so that groups which adopt sets at
// the same time, in whatever order, never meet each other's.
//
// Note [Joining]
// A kJoin says "absent for everything from now on". From the moment the root reads it, that rank counts as absent for
// every unit of its sets that it has not submitted itself, waiting ones included, until every rank of the job has
// joined; then all of them get the answer and go on as before. A joined rank still takes part in every bucket, with
// nothing to contribute and no use for the result: ResponseBucket::described tells it what to run, and its mirror of
// the cache stays equal to everybody's. It may submit nothing until the answer is there. So at that moment nothing is
// waiting: a unit that waits has a member that has neither submitted it nor joined. What is agreed but held back for
// fusion is answered before the join is.
struct UnitSpec : Operation {  // `root` is a GLOBAL rank
  uint32_t process_set = 0;    // 0 is the global set; kRemoveProcessSet: the set to remove
  std::string name;            // unique among the units in flight in its process set
  std::vector<TensorSpec> tensors;
  std::vector<int32_t> ranks;  // kAddProcessSet, kAdoptProcessSet: the members, sorted
  bool operator==(const UnitSpec&) const = default;
};

// The set in which all members must submit the unit, and in which its name is unique. See Note [Changing process sets].
inline uint32_t negotiated_in(const UnitSpec& spec) { return changes_sets(spec.kind) ? 0 : spec.process_set; }

// The names of these are reserved, and the only ones: see Note [Joining] and Note [Changing process sets].
inline constexpr std::string_view kJoinName = "join()";
inline constexpr std::string_view kAdoptionPrefix = "adopt_process_set[";
inline std::string adoption_name(const std::vector<int32_t>& ranks) {
  return "adopt_process_set" + to_string(Dims(ranks.begin(), ranks.end()));
}

using CacheId = uint32_t;
inline constexpr CacheId kNoCacheId = UINT32_MAX;

// Note [Extents]
// What may differ between the ranks of one unit is no part of its description (or of the cache): it travels with every
// request, and the response tells every rank everybody's, in member order.
//   allgather  one number per tensor: the rows this rank contributes
//   alltoall   n numbers per tensor: the rows for each of the n members
// In these kinds the first dimension of TensorSpec::shape is -1. A tensor for which a rank is absent has zeros. The
// answer to a kJoin carries one number, the last rank to join.
inline size_t extents_per_rank(const UnitSpec& spec, size_t members) {
  if (!has_extents(spec.kind)) return 0;
  return spec.kind == OpKind::kAllgather ? spec.tensors.size() : spec.tensors.size() * members;
}

// "This rank is ready for this unit." Either a cache id (the rank and the root hold the same description) or a full
// one.
struct Request {
  CacheId id = kNoCacheId;
  std::unique_ptr<UnitSpec> spec;  // set exactly when id == kNoCacheId
  std::vector<bool> absent;        // empty: present for every tensor; else one bit per tensor
  std::vector<int64_t> extents;    // see Note [Extents]; empty for the other kinds
};

// One unit that failed, on every member alike.
struct ResponseError {
  uint32_t process_set = 0;
  std::string name;
  ErrorCode code = ErrorCode::kInternal;
  int32_t rank = -1;
  std::string message;
};

// What a rank tells of its activity (its stacks) is no longer than this; the middle of a longer text is left out.
inline constexpr size_t kLongestActivity = 8 << 10;

// Rank -> root.
struct RequestList {
  uint64_t acked = 0;               // sequence number of the last ResponseList this rank has applied
  std::vector<uint64_t> completed;  // buckets this rank (first member of their set) has finished
  std::vector<Request> requests;
  std::optional<ResponseError> failure;  // this rank cannot go on (its data plane failed): everybody is to raise this
  std::optional<std::string> activity;   // what this rank does, in answer to ResponseList::probed
};

// One unit inside a response. With `id` cached on the receiver, `name` is empty. A unit seen for the first time carries
// its name, and the id it gets from now on (kNoCacheId: it is not cached).
struct ResponseUnit {
  CacheId id = kNoCacheId;
  std::string name;
  std::vector<int64_t> extents{};  // of all members, one after the other: see Note [Extents]
};

// Units to run together, in this order; members of `process_set` run it, all others ignore it.
struct ResponseBucket {
  uint64_t bucket = 0;  // number of the bucket, strictly increasing over the whole job
  uint32_t process_set = 0;
  bool skip = false;  // every member was absent for every tensor: complete, touch nothing
  std::vector<ResponseUnit> units;
  // Tensors (unit index, tensor index) for which ALL members were absent inside a unit that is not skipped as a whole.
  std::vector<std::pair<uint32_t, uint32_t>> skipped;
  // Where somebody takes part who has not submitted one of the units (it has joined, or others adopt a process set):
  // the description of each, in the order of `units`. Else empty.
  std::vector<UnitSpec> described;
};

// Root -> every rank (the same bytes for all).
struct ResponseList {
  uint64_t sequence = 0;
  std::vector<CacheId> evicted;  // applied before the buckets
  std::vector<ResponseBucket> buckets;
  std::vector<ResponseError> errors;
  std::optional<ResponseError> fatal;  // the whole job has failed
  std::vector<int32_t> probed;         // these ranks are asked what they do, because others wait for them
};

}  // namespace fusewire
