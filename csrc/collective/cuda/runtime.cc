#include "collective/cuda/runtime.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <string>

#include "common/error.h"

namespace fusewire {
namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw Error(ErrorCode::kCollective, std::string(what) + ": " + cudaGetErrorString(error));
}

class CurrentDevice {
 public:
  explicit CurrentDevice(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device) check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = before_ != device;
  }
  ~CurrentDevice() {
    if (changed_) static_cast<void>(cudaSetDevice(before_));
  }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

class Runtime : public CudaApi {
 public:
  Runtime(int device, const CudaKernels& kernels) : device_(device), kernels_(kernels) {}

  Stream create_stream() override {
    const CurrentDevice current(device_);
    int lowest = 0;
    int highest = 0;
    check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest), "cudaStreamCreateWithPriority");
    return stream;
  }
  void destroy_stream(Stream stream) override {
    check(cudaStreamDestroy(static_cast<cudaStream_t>(stream)), "cudaStreamDestroy");
  }
  Event create_event(bool timed) override {
    const CurrentDevice current(device_);
    cudaEvent_t event = nullptr;
    const unsigned flags = cudaEventBlockingSync | (timed ? cudaEventDefault : cudaEventDisableTiming);
    check(cudaEventCreateWithFlags(&event, flags), "cudaEventCreateWithFlags");
    return event;
  }
  void destroy_event(Event event) override { check(cudaEventDestroy(as_event(event)), "cudaEventDestroy"); }

  double elapsed_ms(Event from, Event to) override {
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, as_event(from), as_event(to)), "cudaEventElapsedTime");
    return milliseconds;
  }

  // The default stream is that of the current device, so these need the right one as well.
  void record(Event event, Stream stream) override {
    const CurrentDevice current(device_);
    check(cudaEventRecord(as_event(event), static_cast<cudaStream_t>(stream)), "cudaEventRecord");
  }
  void wait(Stream stream, Event event) override {
    const CurrentDevice current(device_);
    check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), as_event(event), 0), "cudaStreamWaitEvent");
  }
  bool reached(Event event) override {
    const cudaError_t error = cudaEventQuery(as_event(event));
    if (error == cudaErrorNotReady) return false;
    check(error, "cudaEventQuery");
    return true;
  }
  void synchronize(Event event) override { check(cudaEventSynchronize(as_event(event)), "cudaEventSynchronize"); }
  void call(Stream stream, void (*function)(void*), void* argument) override {
    const CurrentDevice current(device_);
    check(cudaLaunchHostFunc(static_cast<cudaStream_t>(stream), function, argument), "cudaLaunchHostFunc");
  }
  bool capturing(Stream stream) override {
    const CurrentDevice current(device_);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }

  void* allocate(size_t bytes) override {
    const CurrentDevice current(device_);
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
    return memory;
  }
  void free(void* memory) override { check(cudaFree(memory), "cudaFree"); }
  void* allocate_pinned(size_t bytes) override {
    const CurrentDevice current(device_);
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable), "cudaHostAlloc");
    return memory;
  }
  void free_pinned(void* memory) override { check(cudaFreeHost(memory), "cudaFreeHost"); }

  void copy(void* to, const void* from, size_t bytes, Stream stream) override {
    const CurrentDevice current(device_);
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)), "cudaMemcpyAsync");
  }
  void fill(void* memory, int byte, size_t bytes, Stream stream) override {
    const CurrentDevice current(device_);
    check(cudaMemsetAsync(memory, byte, bytes, static_cast<cudaStream_t>(stream)), "cudaMemsetAsync");
  }

  void pack(const TransferArgs& args) override { launch(kernels_.pack, args, "the kernel pack"); }
  void unpack(const TransferArgs& args) override { launch(kernels_.unpack, args, "the kernel unpack"); }
  void reduce(const DeviceReduceArgs& args) override { launch(kernels_.reduce, args, "the kernel reduce"); }
  void dot(const DeviceDotArgs& args) override { launch(kernels_.dot, args, "the kernel dot"); }
  void combine(const DeviceCombineArgs& args) override { launch(kernels_.combine, args, "the kernel combine"); }
  void quantise(const DeviceQuantiseArgs& args) override { launch(kernels_.quantise, args, "the kernel quantise"); }
  void dequantise(const DeviceDequantiseArgs& args) override {
    launch(kernels_.dequantise, args, "the kernel dequantise");
  }

  void with_current(const std::function<void()>& function) override {
    const CurrentDevice current(device_);
    function();
  }

  std::array<unsigned char, 16> uuid() override {
    cudaDeviceProp properties{};
    check(cudaGetDeviceProperties(&properties, device_), "cudaGetDeviceProperties");
    std::array<unsigned char, 16> bytes{};
    std::memcpy(bytes.data(), properties.uuid.bytes, bytes.size());
    return bytes;
  }

 private:
  template <typename Args>
  void launch(int (*kernel)(const Args&), const Args& args, const char* what) {
    const CurrentDevice current(device_);
    check(static_cast<cudaError_t>(kernel(args)), what);
  }
  static cudaEvent_t as_event(Event event) { return static_cast<cudaEvent_t>(event); }

  int device_;
  const CudaKernels& kernels_;
};

}  // namespace

std::unique_ptr<CudaApi> make_cuda_runtime(int device, const CudaKernels& kernels) {
  return std::make_unique<Runtime>(device, kernels);
}

}  // namespace fusewire
