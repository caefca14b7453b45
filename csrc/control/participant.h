// Every rank's half of negotiation (the root has one too), as a pure state machine. It mirrors the response cache,
// knows which units are in flight here, and turns responses into work.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "control/message.h"

namespace fusewire {

// A unit's name in flight here, as its submitter knows it.
using UnitToken = uint64_t;

struct WorkUnit {
  UnitToken token = 0;
  std::vector<bool> skipped;     // empty: none; else one bit per tensor that nobody had
  uint32_t created_set = 0;      // kAddProcessSet, kAdoptProcessSet: the id of the set
  bool new_set = false;          // it did not exist before
  std::vector<int64_t> extents;  // of all members: see Note [Extents]
  // Set where this rank takes part without having submitted the unit (see Note [Joining]): it contributes nothing, and
  // nobody waits for the result. `token` means nothing then.
  std::unique_ptr<const UnitSpec> unasked;
};

struct Work {
  uint64_t bucket = 0;
  uint32_t process_set = 0;
  bool skip = false;
  bool report_completion = false;  // call Participant::completed(bucket) when it has run
  std::vector<WorkUnit> units;     // in the order all members use
};

struct Failure {
  UnitToken token = 0;
  ErrorCode code = ErrorCode::kInternal;
  int rank = -1;
  std::string message;
};

// Units announced by a cache id and units described in full, and ids given up.
struct CacheCounts {
  uint64_t hits = 0;
  uint64_t misses = 0;
  uint64_t evictions = 0;
};

class Participant {
 public:
  Participant(int rank, int size);
  ~Participant();
  Participant(const Participant&) = delete;
  Participant& operator=(const Participant&) = delete;

  // Announces a unit. After a kJoin nothing more until that has been answered. The description is copied only when the
  // root does not know it yet, so a caller may keep one and refill it. Throws Error(kDuplicateName) when the name is in
  // flight in that process set, Error(kInvalidArgument) when the set does not exist, this rank is not a member, or the
  // description makes no sense, and the error that the others got for this very unit when they stopped waiting for this
  // rank (see Note [Debts]). `extents` is what this rank brings (Note [Extents]); of tensors that it is absent for they
  // count as zeros.
  void submit(const UnitSpec& spec, std::vector<bool> absent, UnitToken token, std::vector<int64_t> extents = {});

  void completed(uint64_t bucket);

  // This rank cannot go on (its data plane failed). The root makes it the whole job's fatal error; the first one wins.
  void report_failure(ResponseError failure);

  // The answer to Outcome::probed, cut to kLongestActivity.
  void tell_activity(std::string text);

  // What to send to the root. An acknowledgement alone is sent only when a response evicted something.
  bool has_outgoing() const;
  RequestList take_outgoing();

  // Applies a response in sequence order. A fatal response is returned as it is and fails nothing by itself.
  struct Outcome {
    std::vector<Work> work;
    std::vector<Failure> failures;
    std::optional<ResponseError> fatal;
    bool probed = false;  // the root asks what this rank does
  };
  Outcome apply(const ResponseList& response);

  // Units in flight: how many, and their tokens (to fail them all).
  size_t pending() const;
  std::vector<UnitToken> take_pending();

  CacheCounts cache_counts() const;  // any thread

  // Members of a set (global ranks, sorted), nullptr when it does not exist. Set 0 always exists. A set is created by
  // applying the response to a unit that adds one; its id is the number of sets created before it, on every rank.
  const std::vector<int32_t>* members(uint32_t process_set) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fusewire
