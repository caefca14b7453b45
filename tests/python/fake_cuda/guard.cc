// What torch's core asks of a device: current devices and streams, events, and the facts of CUDAHooksInterface.
#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <cstring>

#include "fake_cuda/gpu.h"
#include "fake_cuda/memory.h"

namespace fusewire::fake {
namespace {

constexpr c10::DeviceType kCuda = c10::DeviceType::CUDA;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kCuda; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return c10::Device(kCuda, exchange_device(device.index()));
  }
  c10::Device getDevice() const override { return c10::Device(kCuda, current_device()); }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { exchange_device(device.index()); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }

  c10::Stream getStream(c10::Device device) const override { return current_stream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_with(device.has_index() ? device.index() : current_device(), 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return Gpu::get().new_stream(device.index());
  }
  c10::Stream getNewStream(c10::Device device, int) const override { return Gpu::get().new_stream(device.index()); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return Gpu::get().native_handle(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    synchronizeStream(stream);
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Gpu::get().synchronize_stream(Gpu::get().handle(stream));
  }
  void synchronizeDevice(c10::DeviceIndex device) const override {
    for (const CudaApi::Stream stream : Gpu::get().streams_of(device)) Gpu::get().synchronize_stream(stream);
  }
  bool isStreamCapturing(const c10::Stream& stream) const override {
    return Gpu::get().capturing(Gpu::get().handle(stream));
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag flag) const override {
    if (*event == nullptr) *event = Gpu::get().create_event(flag == c10::EventFlag::BACKEND_DEFAULT);
    Gpu::get().record(*event, Gpu::get().handle(stream));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) Gpu::get().wait(Gpu::get().handle(stream), event);
  }
  bool queryEvent(void* event) const override { return event == nullptr || Gpu::get().reached(event); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Gpu::get().synchronize(event);
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    if (event != nullptr) Gpu::get().destroy_event(event);
  }
  double elapsedTime(void* from, void* to, const c10::DeviceIndex) const override {
    return Gpu::get().elapsed_ms(from, to);
  }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override {
    record_stream(memory, stream);
  }
};

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

const bool registered = [] {
  c10::SetAllocator(kCuda, &allocator(), 1);
  return true;
}();

struct CUDAHooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  int getNumGPUs() const override { return kDevices; }
  c10::DeviceIndex current_device() const override { return fake::current_device(); }
  c10::DeviceIndex getCurrentDevice() const override { return fake::current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  bool isPinnedPtr(const void* memory) const override { return is_pinned(memory); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  // Random numbers are the CPU's.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::globalContext().defaultGenerator(c10::Device(c10::DeviceType::CPU));
  }
  void deviceSynchronize(c10::DeviceIndex device) const override { Guard().synchronizeDevice(device); }
};

// Torch has asked for its hooks while it was imported, found none, and keeps an object that knows no CUDA. It has no
// members, nor has this one: with this one's table of functions it is one of this class.
const bool hooked = [] {
  static_assert(sizeof(CUDAHooks) == sizeof(void*) && sizeof(at::CUDAHooksInterface) == sizeof(void*));
  static const CUDAHooks ours;
  void* const theirs = const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks());
  std::memcpy(theirs, static_cast<const void*>(&ours), sizeof(void*));
  return true;
}();

}  // namespace
}  // namespace fusewire::fake
