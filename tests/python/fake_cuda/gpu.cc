#include "fake_cuda/gpu.h"

#include <array>
#include <random>
#include <stdexcept>

namespace fusewire::fake {
namespace {

thread_local c10::DeviceIndex device_now = 0;
thread_local std::array<int64_t, kDevices> stream_now{};

}  // namespace

c10::DeviceIndex current_device() { return device_now; }

c10::DeviceIndex exchange_device(c10::DeviceIndex device) {
  if (device >= kDevices) throw std::out_of_range("the stand-in has 2 CUDA devices");
  return device < 0 ? device_now : std::exchange(device_now, device);
}

c10::Stream current_stream(c10::DeviceIndex device) {
  if (device < 0) device = device_now;
  return stream_with(device, stream_now.at(static_cast<size_t>(device)));
}

c10::Stream exchange_stream(const c10::Stream& stream) {
  const c10::Stream before = current_stream(stream.device_index());
  stream_now.at(static_cast<size_t>(stream.device_index())) = stream.id();
  return before;
}

Gpu& Gpu::get() {
  static Gpu* const gpu = new Gpu;  // never destroyed: threads and tensors may outlive everything else
  return *gpu;
}

Gpu::Gpu() : CudaDouble(std::random_device{}()) {
  thread_ = std::thread([this] { work(); });
}

void Gpu::work() {
  for (;;) {
    {
      std::unique_lock lock(mutex_);
      wakes_.wait(lock, [this] { return awake_; });
      awake_ = false;
    }
    drain();
  }
}

void Gpu::wake() {
  {
    const std::lock_guard lock(mutex_);
    awake_ = true;
  }
  wakes_.notify_one();
}

void Gpu::copy(void* to, const void* from, size_t bytes, Stream stream) {
  CudaDouble::copy(to, from, bytes, known(stream));
}

void Gpu::quantise(const DeviceQuantiseArgs& args) {
  DeviceQuantiseArgs own = args;
  own.stream = known(args.stream);
  CudaDouble::quantise(own);
}

void Gpu::dequantise(const DeviceDequantiseArgs& args) {
  DeviceDequantiseArgs own = args;
  own.stream = known(args.stream);
  CudaDouble::dequantise(own);
}

void Gpu::record(Event event, Stream stream) {
  CudaDouble::record(event, known(stream));
  wake();
}

void Gpu::wait(Stream stream, Event event) { CudaDouble::wait(known(stream), event); }

void Gpu::call(Stream stream, void (*function)(void*), void* argument) {
  CudaDouble::call(known(stream), function, argument);
  wake();
}

bool Gpu::capturing(Stream stream) { return CudaDouble::capturing(known(stream)); }

CudaApi::Stream Gpu::known(Stream stream) {
  if (stream != nullptr) return stream;
  return handle(stream_with(device_now, 0));
}

CudaApi::Stream Gpu::handle(const c10::Stream& stream) {
  const auto key = std::make_pair(static_cast<int>(stream.device_index()), stream.id());
  const std::lock_guard lock(mutex_);
  if (const auto found = streams_.find(key); found != streams_.end()) return found->second;
  return streams_.emplace(key, create_stream()).first->second;
}

CudaApi::Stream Gpu::native_handle(const c10::Stream& stream) { return stream.id() == 0 ? nullptr : handle(stream); }

c10::Stream Gpu::new_stream(c10::DeviceIndex device) {
  if (device < 0) device = device_now;
  const std::lock_guard lock(mutex_);
  const auto id = static_cast<int64_t>(streams_.size()) + 1;
  streams_.emplace(std::make_pair(static_cast<int>(device), id), create_stream());
  return stream_with(device, id);
}

std::vector<CudaApi::Stream> Gpu::streams_of(c10::DeviceIndex device) {
  const std::lock_guard lock(mutex_);
  std::vector<Stream> all;
  for (const auto& [key, stream] : streams_) {
    if (key.first == device) all.push_back(stream);
  }
  return all;
}

void Gpu::synchronize_stream(Stream stream) {
  const Event event = create_event(false);
  record(event, stream);
  synchronize(event);
  destroy_event(event);
}

}  // namespace fusewire::fake
