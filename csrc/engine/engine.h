// The Engine: everything one rank needs to take part in collectives. An object, not a singleton: a process may hold
// many (tests run eight ranks as threads).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collective/gpu_plane.h"
#include "common/config.h"
#include "common/error.h"
#include "common/types.h"
#include "engine/handle.h"
#include "engine/observer.h"
#include "engine/stats.h"
#include "transport/endpoint.h"

namespace fusewire {

// One tensor of a submission.
struct SubmittedTensor {
  TensorView input;   // data == nullptr: absent, contributes the identity
  TensorView output;  // may be the input; data == nullptr: result not wanted here
  DataType wire = DataType::kFloat32;
  bool absent = false;  // no value here in this window; `input` (a stale value) still counts if somebody has one
};

// Opens the GPU that this rank uses: number `index`, or its current one where that is -1 (a rank that has joined before
// it has used any). Called once, on any thread, without the GIL, when the first bucket of CUDA tensors is to run.
using GpuOpener = std::function<OpenGpu(int index)>;

// Makes the output of tensor `index` of a submission.
using Allocator = std::function<TensorView(size_t index, const Dims& shape)>;

struct Submission : Operation {  // `root` is a global rank
  uint32_t process_set = 0;
  std::string name;
  std::vector<SubmittedTensor> tensors;  // more than one: an explicit group, all or nothing
  std::vector<int32_t> ranks;            // kAddProcessSet, kAdoptProcessSet: sorted global ranks
  // What this rank brings: see Note [Extents] in control/message.h. An alltoall's splits; an allgather may leave it
  // empty, as it follows from the inputs.
  std::vector<int64_t> extents;
  // Where the shape of a result depends on the other ranks (allgather, alltoall): called once the shape is known, on
  // any thread, without the GIL, at most once per tensor, also for tensors that nobody had (no rows). What it makes
  // must live until the handle is dropped. If it throws, the whole job fails. Null: the results are not wanted here.
  // Dropped as `keep_alive` is, so it may own Python objects.
  Allocator allocate;
  std::shared_ptr<void> keep_alive;  // keeps every `data` pointer valid
  UnitObserver* observer = nullptr;  // may be null
};

class Engine {
 public:
  // Takes part as endpoint->rank(). Starts the coordinator thread ("fw-coord") and, on first need, the executor thread
  // ("fw-exec").
  Engine(std::unique_ptr<Endpoint> endpoint, const Config& config, GpuOpener open_gpu = {});
  ~Engine();  // shutdown(true, "engine destroyed")
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  int rank() const;
  int size() const;

  // Hands a unit over; returns at once. Throws Error: kInvalidType (an operator without meaning for a dtype),
  // kInvalidArgument (no first dimension where one is needed, splits that do not sum to it), kShutdown, or the error
  // that has failed the engine. What only the protocol can tell (kDuplicateName, an unknown process set,
  // kTensorMismatch, ...) is thrown by wait(). `wake == false` leaves the coordinator asleep: for a caller that waits
  // right away.
  Handle submit(Submission submission, bool wake = true);

  // Until done, which means launched for CUDA tensors (Note [Done and reached]); drives the engine meanwhile. Throws
  // the unit's error. Never needs the GIL: call it without. `on_signal` is called when a signal handler has run on this
  // thread; what it throws ends the wait. The unit stays in flight, but where this thread runs its bucket already (Note
  // [Signals in a wait]): then the engine fails.
  void wait(const Handle& handle, const std::function<void()>& on_signal = {});
  // Throws the first error after all are done.
  void wait_all(const std::vector<Handle>& handles, const std::function<void()>& on_signal = {});

  // Whether it is done. Never blocks.
  bool poll(const Handle& handle);

  // Leaves the job: pending units fail with kShutdown, peers are told. `clean == false` means "I failed, for this
  // reason". Idempotent; joins all threads.
  void shutdown(bool clean, const std::string& reason);

  // Whether the engine has failed for good (peer lost, stalled, ...); the error it failed with.
  std::shared_ptr<const Error> failure() const;

  // The name of the data plane that moves CPU tensors: "shm", "mpi".
  std::string data_plane() const;

  // The same for CUDA tensors, in the process set of all: "nccl", "staged"; "" before the first of them. `reason` says
  // why it is not NCCL.
  std::string gpu_data_plane(std::string* reason = nullptr) const;

  // Members of a process set (global ranks, sorted); throws kInvalidArgument when there is no such set.
  std::vector<int32_t> members(uint32_t process_set) const;

  EngineStats stats() const;  // since the engine was made; any thread

  // Records what happens from now on in a file that Chrome and Perfetto read (docs/timeline.md): see timeline_path()
  // for which. Throws Error(kInvalidArgument) when one is being recorded or the file cannot be made. stop() returns
  // when it is written; shutdown does that, too.
  void start_timeline(const std::string& path, bool mark_cycles);
  void stop_timeline();
  size_t pending() const;  // units in flight here

  // Where the answer comes from when rank 0 asks what this rank does, because others wait for it: a text of at most
  // kLongestActivity bytes, found out within half a second on a thread of the engine's. Without one nothing is
  // answered.
  void set_activity_source(std::function<std::string()> source);

  // In a forked child: drop descriptors and mappings; every later call raises kShutdown.
  void abandon_after_fork() noexcept;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fusewire
