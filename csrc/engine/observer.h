// Somebody outside the engine who wants to know how one unit fares: torch's profiler.
#pragma once

#include <cstdint>

namespace fusewire {

// The engine never owns one: it lives as long as its submission's keep_alive. Called on any thread, without the GIL, in
// this order; what has not happened is left out.
class UnitObserver {
 public:
  virtual void answered() = 0;    // all ranks have it
  virtual void run_begins() = 0;  // its bucket
  virtual void ended() = 0;       // done or failed; the last call

 protected:
  ~UnitObserver() = default;
};

// What a unit carries through the engine for those who watch.
struct UnitTrace {
  uint64_t number = 0;  // in the timeline; 0: not there
  UnitObserver* observer = nullptr;
};

}  // namespace fusewire
