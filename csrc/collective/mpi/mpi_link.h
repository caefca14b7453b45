// One member's messages to the other members of its process set: what is in flight, waiting for it, and giving up.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "collective/mpi/mpi_process.h"
#include "collective/signal_gate.h"
#include "collective/stop_word.h"
#include "common/chunk_trace.h"

namespace fusewire {

// A communicator of this job alone, and which of its ranks is which rank of the job.
//
// Note [Process sets and communicators]
// All sets of a job share one communicator. A set's messages are told apart by their tag; and even without tags none
// could be taken for another, because all ranks run all buckets in one global order. A communicator per set would have
// to be made by a call that blocks until all members have come, and there is no way out of it when one of them dies;
// MPICH also has room for about 2,000 of them only.
class MpiJob {
 public:
  // Collective over MPI_COMM_WORLD, which must be this job: throws Error(kInvalidArgument) where its size is another,
  // kStalled where the others do not come within `abort_after` (0: waits for ever).
  MpiJob(MpiProcess& process, int rank, int size, std::chrono::nanoseconds abort_after);
  ~MpiJob();
  MpiJob(const MpiJob&) = delete;
  MpiJob& operator=(const MpiJob&) = delete;

  MpiProcess& process() { return process_; }
  MpiApi& api() { return process_.api(); }
  MpiComm comm() const { return comm_; }
  int mpi_rank(int rank) const { return ranks_.at(static_cast<size_t>(rank)); }
  void note_abandoned();

 private:
  void meet(int rank, int size, std::chrono::nanoseconds abort_after);
  void complete(MpiRequest& request, std::chrono::nanoseconds abort_after);

  MpiProcess& process_;
  MpiComm comm_;
  std::vector<int> ranks_;
  std::atomic<bool> abandoned_{false};
};

struct MpiOptions {
  std::vector<int32_t> ranks;               // of the job: the members of the set, sorted
  int rank = 0;                             // this one, inside the set
  uint32_t process_set = 0;                 // makes the tag
  size_t message_bytes = 0;                 // at most, for tests; 0: by the number of ranks
  std::chrono::microseconds spin{20};       // before a wait sleeps; 0 where ranks outnumber cores
  std::chrono::nanoseconds abort_after{0};  // a wait longer than this throws kStalled; 0: never
};

class MpiLink {
 public:
  // What a message is for; wait() is for all of one kind. Two of each: a step and the one before it.
  enum Purpose : int { kGive, kGiveNext, kReturn, kReturnNext };
  static constexpr int kPurposes = 4;

  MpiLink(std::shared_ptr<MpiJob> job, const MpiOptions& options, StopWord stop);

  // A bucket begins.
  void begin(ChunkTrace* trace, int64_t elements) {
    moving_ = false;
    watch_.start(trace, elements);
  }
  ChunkStopwatch& watch() { return watch_; }
  SignalGate& signals() { return signals_; }  // is told of signals that cut a nap short

  // Peers are ranks inside the set; nothing is sent for 0 bytes. `data` belongs to MPI until wait(purpose) has
  // returned. Between two ranks, the first message sent is the first received, whatever the purposes.
  void send(Purpose purpose, int peer, const std::byte* data, size_t bytes);
  void receive(Purpose purpose, int peer, std::byte* data, size_t bytes);

  // Until everything for `purpose` has completed; all other messages get on meanwhile.
  void wait(Purpose purpose);

  // Gives up what is in flight.
  void abandon() noexcept;

  StopWord stop() const { return stop_; }
  std::vector<int> laggards() const;  // any thread
  int rank() const { return rank_; }
  int size() const { return static_cast<int>(peers_.size()); }

 private:
  struct Flight {
    int peer;
    Purpose purpose;
    bool receive;
  };
  class Pause;

  void add(Purpose purpose, int peer, bool receive, const MpiRequest& request, size_t bytes);
  bool progress();
  void publish_laggards(Purpose purpose);
  [[noreturn]] void give_up();

  const std::shared_ptr<MpiJob> job_;
  MpiApi& api_;
  const MpiComm comm_;
  const int rank_;
  const int tag_;
  std::vector<int> peers_;  // MPI's ranks
  const std::chrono::nanoseconds spin_;
  const std::chrono::nanoseconds abort_after_;
  const StopWord stop_;

  std::vector<MpiRequest> requests_;
  std::vector<Flight> flights_;  // the same order
  int outstanding_[kPurposes] = {};
  size_t bytes_[kPurposes] = {};  // of those, and of those that have completed since there were none
  std::vector<int> finished_;
  ChunkStopwatch watch_;
  SignalGate signals_;
  bool moving_ = false;  // some message of this bucket has completed

  mutable std::mutex mutex_;  // a leaf; laggards_ only
  std::vector<int> laggards_;
};

}  // namespace fusewire
