// A submission while the engine owns it, and the table that gives it a token for the control plane.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <utility>
#include <vector>

#include "common/types.h"
#include "engine/engine.h"
#include "engine/handle.h"
#include "engine/observer.h"

namespace fusewire {

struct InFlight : Operation {
  uint32_t process_set = 0;
  std::vector<SubmittedTensor> tensors;
  const Allocator* allocate = nullptr;  // null: there is none; lives as long as the handle's keep-alive
  Handle handle;                        // null: nobody waits for it, see unasked()
  UnitTrace trace{};
  std::chrono::steady_clock::time_point taken{};  // when the driver took it up
};

// Tokens are indices into a slab, so that a lookup is one array access. Only the driver touches it.
class InFlightTable {
 public:
  using Clock = std::chrono::steady_clock;

  // A join may wait for as long as others have work; what its age means the caller knows.
  uint64_t add(InFlight&& unit, Clock::time_point now) {
    uint32_t slot;
    if (free_.empty()) {
      slot = static_cast<uint32_t>(slots_.size());
      slots_.emplace_back();
    } else {
      slot = free_.back();
      free_.pop_back();
    }
    Slot& added = slots_[slot];
    added.unit = std::move(unit);
    added.unit.taken = now;
    added.used = true;
    ++added.generation;
    if (added.unit.kind != OpKind::kJoin) ages_.push_back({slot, added.generation, now});
    return slot;
  }

  InFlight take(uint64_t token) {
    Slot& slot = slots_.at(token);
    free_.push_back(static_cast<uint32_t>(token));  // may throw: first
    slot.used = false;
    InFlight unit = std::move(slot.unit);
    static_cast<void>(oldest());  // lets go of the ages that have passed
    return unit;
  }

  std::vector<InFlight> take_all() {
    std::vector<InFlight> all;
    for (size_t slot = 0; slot < slots_.size(); ++slot) {
      if (slots_[slot].used) all.push_back(take(slot));
    }
    return all;
  }

  // When the oldest unit still here, joins aside, was added; time_point::max() when there is none. Amortised O(1).
  Clock::time_point oldest() {
    while (!ages_.empty()) {
      const Age& age = ages_.front();
      const Slot& slot = slots_[age.slot];
      if (slot.used && slot.generation == age.generation) return age.added;
      ages_.pop_front();
    }
    return Clock::time_point::max();
  }

 private:
  struct Slot {
    InFlight unit;
    uint64_t generation = 0;
    bool used = false;
  };
  struct Age {
    uint32_t slot;
    uint64_t generation;
    Clock::time_point added;
  };
  std::deque<Slot> slots_;
  std::vector<uint32_t> free_;
  std::deque<Age> ages_;
};

}  // namespace fusewire
