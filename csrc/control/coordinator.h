// The root's half of negotiation, as a pure state machine: no thread, no socket, no clock of its own. Feed it what the
// ranks say and what time it is; take out what all ranks must do. 4,096 ranks can be simulated in one test.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/config.h"
#include "control/message.h"

namespace fusewire {

using TimePoint = std::chrono::steady_clock::time_point;

class Coordinator {
 public:
  Coordinator(int size, const Config& config);
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  void receive(int rank, RequestList&& message, TimePoint now);

  // A rank said goodbye (`clean`) or its connection broke. Clean and nothing pending: nobody is disturbed, but what
  // needs that rank from now on fails with PeerLostError carrying `reason`. Otherwise the job has failed.
  void leave(int rank, bool clean, const std::string& reason, TimePoint now);

  // Reports of stalled units, and the abort when their time is over. Call when next_deadline() has passed.
  void tick(TimePoint now);
  std::optional<TimePoint> next_deadline() const;  // nullopt: nothing is pending, no timer is needed
  std::vector<std::string> take_reports();         // texts for the log

  // What to broadcast, if there is anything. Call until nullopt after every receive / leave / tick.
  std::optional<ResponseList> poll(TimePoint now);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fusewire
