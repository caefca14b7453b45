#include "collective/cuda/runtime.h"

#include <cuda_runtime_api.h>

#include <cstring>
#include <string>

#include "common/error.h"

namespace fusewire {
namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  // It stays the thread's last error, and the next launch of a kernel would be taken for failed.
  static_cast<void>(cudaGetLastError());
  throw Error(ErrorCode::kCollective, std::string(what) + ": " + cudaGetErrorString(error));
}

// Whether the process uses the device already. Making it a thread's current one would else give it a context, hundreds
// of megabytes on the first GPU for every rank that uses another. Only the driver can tell, and nothing here links it.
bool in_use(int device) {
  using State = int (*)(int device, unsigned* flags, int* active);  // cuDevicePrimaryCtxGetState
  static const State state = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &function, 7000, cudaEnableDefault, &found);
#else
    const cudaError_t error =
        cudaGetDriverEntryPoint("cuDevicePrimaryCtxGetState", &function, cudaEnableDefault, &found);
#endif
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) {
      static_cast<void>(cudaGetLastError());
      function = nullptr;
    }
    return reinterpret_cast<State>(function);
  }();
  unsigned flags = 0;
  int active = 0;
  return state == nullptr || state(device, &flags, &active) != 0 || active != 0;  // in doubt it is
}

// Note [On a device]
// Nearly every call of the runtime's, cudaEventQuery too, works on the thread's current device and gives it a context.
// So all of them are made under this. A thread gets back the device that it had, unless the process does not use that
// one: torch leaves threads so, too. For the same time the thread is allowed what a capture of somebody else's CUDA
// graph, which is none of this engine's business, forbids to all threads by default.
class OnDevice {
 public:
  explicit OnDevice(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ != device) check(cudaSetDevice(device), "cudaSetDevice");
    changed_ = before_ != device;
    static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_));
  }
  ~OnDevice() {
    static_cast<void>(cudaThreadExchangeStreamCaptureMode(&mode_));
    if (changed_ && in_use(before_)) static_cast<void>(cudaSetDevice(before_));
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

class Runtime : public CudaApi {
 public:
  Runtime(int device, const CudaKernels& kernels) : device_(device), kernels_(kernels) {}

  Stream create_stream() override {
    const OnDevice on(device_);
    int lowest = 0;
    int highest = 0;
    check(cudaDeviceGetStreamPriorityRange(&lowest, &highest), "cudaDeviceGetStreamPriorityRange");
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest), "cudaStreamCreateWithPriority");
    return stream;
  }
  void destroy_stream(Stream stream) override {
    const OnDevice on(device_);
    check(cudaStreamDestroy(static_cast<cudaStream_t>(stream)), "cudaStreamDestroy");
  }
  Event create_event(bool timed) override {
    const OnDevice on(device_);
    cudaEvent_t event = nullptr;
    const unsigned flags = cudaEventBlockingSync | (timed ? cudaEventDefault : cudaEventDisableTiming);
    check(cudaEventCreateWithFlags(&event, flags), "cudaEventCreateWithFlags");
    return event;
  }
  void destroy_event(Event event) override {
    const OnDevice on(device_);
    check(cudaEventDestroy(as_event(event)), "cudaEventDestroy");
  }

  double elapsed_ms(Event from, Event to) override {
    const OnDevice on(device_);
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, as_event(from), as_event(to)), "cudaEventElapsedTime");
    return milliseconds;
  }

  // The default stream is that of the current device, so these need the right one as well.
  void record(Event event, Stream stream) override {
    const OnDevice on(device_);
    check(cudaEventRecord(as_event(event), static_cast<cudaStream_t>(stream)), "cudaEventRecord");
  }
  void wait(Stream stream, Event event) override {
    const OnDevice on(device_);
    check(cudaStreamWaitEvent(static_cast<cudaStream_t>(stream), as_event(event), 0), "cudaStreamWaitEvent");
  }
  bool reached(Event event) override {
    const OnDevice on(device_);
    const cudaError_t error = cudaEventQuery(as_event(event));
    if (error == cudaErrorNotReady) {
      static_cast<void>(cudaGetLastError());  // as in check()
      return false;
    }
    check(error, "cudaEventQuery");
    return true;
  }
  void synchronize(Event event) override {
    const OnDevice on(device_);
    check(cudaEventSynchronize(as_event(event)), "cudaEventSynchronize");
  }
  void call(Stream stream, void (*function)(void*), void* argument) override {
    const OnDevice on(device_);
    check(cudaLaunchHostFunc(static_cast<cudaStream_t>(stream), function, argument), "cudaLaunchHostFunc");
  }
  bool capturing(Stream stream) override {
    const OnDevice on(device_);
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    check(cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status), "cudaStreamIsCapturing");
    return status != cudaStreamCaptureStatusNone;
  }

  void* allocate(size_t bytes) override {
    const OnDevice on(device_);
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
    return memory;
  }
  void free(void* memory) override {
    const OnDevice on(device_);
    check(cudaFree(memory), "cudaFree");
  }
  void* allocate_pinned(size_t bytes) override {
    const OnDevice on(device_);
    void* memory = nullptr;
    check(cudaHostAlloc(&memory, bytes, cudaHostAllocPortable), "cudaHostAlloc");
    return memory;
  }
  void free_pinned(void* memory) override {
    const OnDevice on(device_);
    check(cudaFreeHost(memory), "cudaFreeHost");
  }

  void copy(void* to, const void* from, size_t bytes, Stream stream) override {
    const OnDevice on(device_);
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, static_cast<cudaStream_t>(stream)), "cudaMemcpyAsync");
  }
  void fill(void* memory, int byte, size_t bytes, Stream stream) override {
    const OnDevice on(device_);
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
    const OnDevice on(device_);
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
    const OnDevice on(device_);
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
