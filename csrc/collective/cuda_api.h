// What data planes ask of CUDA, as an interface: streams, events, memory, copies, and the kernels. The real one is
// collective/cuda/runtime.h; tests have a double that checks every program of streams and events for missing waits.
//
// Note [Order on streams]
// Whatever takes a stream only puts work on it. Work on one stream runs in the order given, work on two in any order,
// unless one of them waits for an event that was recorded on the other BEFORE the wait was asked for: waiting for an
// event that has not been recorded yet waits for nothing. The host knows that work is done after synchronize(event), or
// once reached(event) is true. Memory may be freed, and pinned memory touched by the host, only then.
//
// All functions throw Error (kCollective) when CUDA reports a failure, which may be that of earlier work.
#pragma once

#include <array>
#include <cstddef>
#include <functional>

#include "kernels/cuda_kernels.h"

namespace fusewire {

class CudaApi {
 public:
  using Stream = CudaStream;
  using Event = void*;

  virtual ~CudaApi() = default;

  virtual Stream create_stream() = 0;  // of the highest priority; waits for no other, the default stream included
  virtual void destroy_stream(Stream stream) = 0;
  virtual Event create_event(bool timed = false) = 0;
  virtual void destroy_event(Event event) = 0;
  virtual double elapsed_ms(Event from, Event to) = 0;  // both timed and reached

  virtual void record(Event event, Stream stream) = 0;
  virtual void wait(Stream stream, Event event) = 0;  // work put on the stream from now on
  virtual bool reached(Event event) = 0;
  virtual void synchronize(Event event) = 0;  // sleeps, spins on nothing
  // Calls function(argument) on a thread of CUDA's when the stream has come so far. It must not call CUDA.
  virtual void call(Stream stream, void (*function)(void*), void* argument) = 0;
  virtual bool capturing(Stream stream) = 0;  // work put on it goes to a CUDA graph instead

  virtual void* allocate(size_t bytes) = 0;  // device memory
  virtual void free(void* memory) = 0;
  virtual void* allocate_pinned(size_t bytes) = 0;  // host memory that copies and kernels reach
  virtual void free_pinned(void* memory) = 0;

  virtual void copy(void* to, const void* from, size_t bytes, Stream stream) = 0;
  virtual void fill(void* memory, int byte, size_t bytes, Stream stream) = 0;
  virtual void pack(const TransferArgs& args) = 0;
  virtual void unpack(const TransferArgs& args) = 0;
  virtual void reduce(const DeviceReduceArgs& args) = 0;
  virtual void dot(const DeviceDotArgs& args) = 0;
  virtual void combine(const DeviceCombineArgs& args) = 0;
  virtual void quantise(const DeviceQuantiseArgs& args) = 0;
  virtual void dequantise(const DeviceDequantiseArgs& args) = 0;

  // Calls `function` with this GPU as the calling thread's current one, for libraries that go by that.
  virtual void with_current(const std::function<void()>& function) { function(); }

  // The same for two processes exactly where both use the same GPU (or the same slice of one).
  virtual std::array<unsigned char, 16> uuid() = 0;
};

}  // namespace fusewire
