// The GPUs of this process as torch has them: what makes a CudaApi, the stream that engines work on, and what orders
// their work with torch's own.
//
// Everything torch has to be asked goes through c10's interface for devices of any kind, whose implementation for CUDA
// comes with a torch that has it. So nothing here needs a library of CUDA's, and the module imports beside a CPU-only
// torch.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include <memory>
#include <string>

#include "collective/gpu_device.h"

namespace fusewire::gpu {

// Note [Streams of a GPU]
// Engines work on one stream per GPU, of high priority and from torch's pool: torch's allocator knows it, so results
// whose shape is known late can be allocated on it, and be recorded on the stream of whoever takes them.
//
// Callers have streams of their own, which torch calls current. Whoever submits marks its current stream, after
// everything that the tensors need has been put on it (the allocation of outputs, too: their memory may be in use by
// what is on that stream already); the engine's stream waits for the mark. Whoever waits for a handle makes its current
// stream wait for the handle's event. The host waits for neither.
class Gpu {
 public:
  Gpu(std::shared_ptr<GpuDevice> device, const c10::Stream& stream) : device_(std::move(device)), stream_(stream) {}
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  const std::shared_ptr<GpuDevice>& device() const { return device_; }
  const c10::Stream& stream() const { return stream_; }  // device()->stream() as torch knows it

  // The calling thread's current stream, for CudaApi.
  CudaApi::Stream current_stream() const;

  // An event on the calling thread's current stream. Throws Error(kInvalidArgument) while that is captured into a CUDA
  // graph.
  SharedEvent mark_current() const;

  // What is put on the calling thread's current stream from now on comes after `event`.
  void hold_up_current(const GpuEvent& event) const;

  // A contiguous tensor whose memory belongs to the engines' stream. Any thread, without the GIL.
  at::Tensor allocate(at::IntArrayRef shape, at::ScalarType type) const;

  // The memory of `tensor` (from allocate()) is used on the calling thread's current stream.
  void record_use(const at::Tensor& tensor) const;

 private:
  c10::Stream current() const;

  const std::shared_ptr<GpuDevice> device_;
  const c10::Stream stream_;
};

// Why CUDA tensors cannot be communicated by this build and this torch; empty: they can.
const std::string& obstacle();

// GPU number `index`. Made on first use, and never destroyed: something may be left on it when the process ends. Throws
// Error(kInvalidArgument) with obstacle(), and what CUDA reports. Thread-safe.
Gpu& get(int index);

// The calling thread's current GPU, or -1 where there is none. Never initialises CUDA.
int current_index() noexcept;

// What makes a CudaApi for GPU number `device`.
using ApiMaker = std::shared_ptr<CudaApi> (*)(int device);

// Tests bring one that needs no GPU, with a device guard of its own for torch. Before the first use of a GPU.
void replace_api_maker(ApiMaker maker);

}  // namespace fusewire::gpu
