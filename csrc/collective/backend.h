// How data moves. A Backend belongs to one process set on one engine and runs buckets that the control plane has put in
// one global order; it knows nothing of names, negotiation or handles.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "common/chunk_trace.h"
#include "common/types.h"

namespace fusewire {

// One tensor of a bucket. `input.data == nullptr`: this rank is absent and contributes the operator's identity.
// `output.data == nullptr`: the result is not wanted here. Input and output may be the same memory.
//
// Note [Counts]
// Where ranks hold different parts of a tensor, `counts` says how many elements (in logical order, whole rows) are
// whose, n being the number of members:
//   allgather       n of them: member i contributes counts[i]; the output is their concatenation in member order
//   alltoall        n * n of them: member i sends counts[i * n + j] to member j; the input is cut in the order of j,
//                   the output is put together in the order of i
//   reduce-scatter  n of them: member i receives counts[i] of the reduced input
//   others          none: everybody's input and output have the same elements
// Note [Device planes]
// A plane for CUDA tensors (nccl, staged) works on the stream of its GpuDevice. Before run(), that stream has been made
// to wait for every `ready_event` in the bucket; when run() returns, all that is left to do is on that stream, so an
// event recorded there then is what results have to be waited for. run() itself waits for nothing that the control
// plane has not answered for: nccl returns at once, staged when its part of the work on the host is done. What it has
// left on the device may still fail or, with a peer gone, never end: check() tells of the first, abort() ends both.
struct Segment {
  TensorView input;
  TensorView output;
  std::vector<int64_t> counts{};
};

// Tensors that are reduced together. All members of the process set hold equal Buckets but for the pointers, strides
// and absences in their segments.
struct Bucket : Operation {  // `root` is the rank inside the process set
  DataType dtype = DataType::kFloat32;
  DataType wire = DataType::kFloat32;  // narrower than dtype under fp16 / bf16 compression
  DeviceType device = DeviceType::kCpu;
  std::vector<Segment> segments;
  int64_t elements = 0;         // sum of the segments' numel (of their inputs)
  ChunkTrace* trace = nullptr;  // is told what run() does, if not null
  // Called on the thread of run() when a signal handler has run there while it waited, if not null. What it throws, an
  // Error, ends run(): signal_gate.h Note [Signals in a wait].
  const std::function<void()>* on_signal = nullptr;
};

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const = 0;

  // Runs the bucket to its end on the calling thread. Called by one thread at a time, in the same order on every
  // member. Throws Error: kCollective for a failure of its own, kPeerLost / kStalled / kShutdown after abort().
  virtual void run(const Bucket& bucket) = 0;

  // Makes a run() in progress on ANY member, and every later one, throw soon, and what run() has left on a device of
  // THIS member end soon, with no result. Thread-safe, idempotent.
  virtual void abort() noexcept = 0;

  // Throws as run() would if the plane has been aborted, by whichever member can tell this one; a device plane also
  // what has gone wrong with work left on the device (it is asked about once a second while there is some).
  // Thread-safe.
  virtual void check() = 0;

  // Ranks (inside the set) whose progress is behind in the bucket that run() is in; empty when none is. Thread-safe.
  virtual std::vector<int> laggards() const = 0;
};

}  // namespace fusewire
