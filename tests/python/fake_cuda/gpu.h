// The GPUs that this process pretends to have: CudaDouble, with a thread that works on its streams as a GPU would, and
// torch's streams on top of it.
//
// Note [Torch on the double]
// Torch's own kernels run at once, on the thread that calls them. Before one runs, the double does all that its stream
// waits for; then the double is told what memory it has used, as a piece of work on that stream. So results are right
// if the program is, everything that torch and Fusewire do to memory is checked together, and a wait that is missing
// between them is a mistake in every run.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "simt/cuda_double.h"

namespace fusewire::fake {

constexpr int kDevices = 2;

// Stream 0 is the device's default one.
inline c10::Stream stream_with(c10::DeviceIndex device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::DeviceType::CUDA, device), id);
}

class Gpu : public testing::CudaDouble {
 public:
  // Lives until the process ends. Both devices are one double, so that streams of one can wait for the other's events.
  static Gpu& get();

  // As in CUDA, a null stream is the default one of the thread's current device.
  void record(Event event, Stream stream) override;
  void wait(Stream stream, Event event) override;
  void call(Stream stream, void (*function)(void*), void* argument) override;
  bool capturing(Stream stream) override;
  void copy(void* to, const void* from, size_t bytes, Stream stream) override;
  void quantise(const DeviceQuantiseArgs& args) override;
  void dequantise(const DeviceDequantiseArgs& args) override;

  // A stream of torch's as the double knows it, and as torch gives it away (null: a default stream).
  Stream handle(const c10::Stream& stream);
  Stream native_handle(const c10::Stream& stream);
  c10::Stream new_stream(c10::DeviceIndex device);
  std::vector<Stream> streams_of(c10::DeviceIndex device);
  // Waits, on the host.
  void synchronize_stream(Stream stream);

 private:
  Gpu();
  void work();  // the thread
  void wake();
  Stream known(Stream stream);

  std::mutex mutex_;  // before the double's own
  std::condition_variable wakes_;
  bool awake_ = false;
  std::map<std::pair<int, int64_t>, Stream> streams_;
  std::thread thread_;
};

// The calling thread's.
c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);
c10::Stream exchange_stream(const c10::Stream& stream);

}  // namespace fusewire::fake
