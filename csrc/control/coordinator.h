// The root's half of negotiation, as a pure state machine: no thread, no socket, no clock of its own. Feed it what the
// ranks say and what time it is; take out what all ranks must do. 4,096 ranks can be simulated in one test.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/config.h"
#include "control/message.h"
#include "control/time_point.h"

namespace fusewire {

class Coordinator {
 public:
  Coordinator(int size, const Config& config);
  ~Coordinator();
  Coordinator(const Coordinator&) = delete;
  Coordinator& operator=(const Coordinator&) = delete;

  // Is told of every announcement that counts, on the thread that calls receive().
  using AnnouncedCallback = std::function<void(int rank, uint32_t process_set, const std::string& name)>;
  void on_announced(AnnouncedCallback callback);

  void receive(int rank, RequestList&& message, TimePoint now);

  // A rank said goodbye (`clean`: with nothing pending, its part of every bucket it was told to run is done) or its
  // connection broke. Nobody is disturbed while nobody waits: the first to submit something that needs the rank
  // (anything at all, if it broke off) raises PeerLostError with `reason` on all ranks. If somebody waits for it
  // already (or for anything at all, or a bucket is running, if it broke off), that is at once. What only the leaving
  // rank had submitted is forgotten. Hand in what it had still sent before.
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
