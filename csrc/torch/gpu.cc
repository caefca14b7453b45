#include "torch/gpu.h"

#include <ATen/Functions.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <array>
#include <atomic>
#include <mutex>
#include <utility>

#include "common/error.h"
#ifdef FUSEWIRE_WITH_CUDA
#include "collective/cuda/runtime.h"
#endif

namespace fusewire::gpu {
namespace {

using Guard = c10::impl::VirtualGuardImpl;

// The CUDA that nvcc has compiled into this module, or null.
ApiMaker built_in_maker() {
#ifdef FUSEWIRE_WITH_CUDA
  return [](int device) -> std::shared_ptr<CudaApi> { return make_cuda_runtime(device, kCudaKernels); };
#else
  return nullptr;
#endif
}

struct Table {
  std::mutex mutex;  // a leaf but for CUDA and torch
  std::atomic<ApiMaker> maker{built_in_maker()};
  std::array<std::atomic<Gpu*>, 128> gpus{};  // as many as a c10::DeviceIndex can name

  static Table& instance() {
    static Table& table = *new Table;  // engines may outlive static destructors
    return table;
  }
};

c10::Device device_number(int index) { return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

// Torch before 2.12 or so can be asked for a stream's handle only through a class of its CUDA library's, which is one
// c10::Stream and nothing else.
template <class Interface>
void* native_handle(const Interface& guard, const c10::Stream& stream) {
  if constexpr (requires { guard.getStreamNativeHandle(stream); }) {
    return guard.getStreamNativeHandle(stream);
  } else {
    using Method = void* (*)(const c10::Stream*);
    static const auto method = [] {
      void* library = dlopen("libc10_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
      void* symbol = library == nullptr ? nullptr : dlsym(library, "_ZNK3c104cuda10CUDAStream6streamEv");
      if (symbol == nullptr) throw Error(ErrorCode::kInternal, "this torch does not say which CUDA streams it uses");
      return reinterpret_cast<Method>(symbol);
    }();
    return method(&stream);
  }
}

// Makes a stream the calling thread's current one, for torch.
class OnStream {
 public:
  explicit OnStream(const c10::Stream& stream) : guard_(c10::kCUDA), before_(guard_.exchangeStream(stream)) {}
  ~OnStream() { guard_.exchangeStream(before_); }
  OnStream(const OnStream&) = delete;
  OnStream& operator=(const OnStream&) = delete;

 private:
  const Guard guard_;
  const c10::Stream before_;
};

Gpu* make(int index) {
  const Guard guard(c10::kCUDA);
  const c10::Stream stream = guard.getStreamFromGlobalPool(device_number(index), /*isHighPriority=*/true);
  std::shared_ptr<CudaApi> api = Table::instance().maker.load()(index);
  return new Gpu(std::make_shared<GpuDevice>(std::move(api), index, native_handle(guard, stream)), stream);
}

}  // namespace

c10::Stream Gpu::current() const { return Guard(c10::kCUDA).getStream(stream_.device()); }

CudaApi::Stream Gpu::current_stream() const { return native_handle(Guard(c10::kCUDA), current()); }

SharedEvent Gpu::mark_current() const {
  void* const stream = current_stream();
  if (device_->api().capturing(stream)) {
    throw Error(ErrorCode::kInvalidArgument,
                "a CUDA graph is being captured on the current stream, and Fusewire's operations cannot be part of one "
                "(ranks agree on them anew each time): capture the forward and backward of a model without a wrapped "
                "optimizer, or leave the communication out of the graph");
  }
  return device_->mark(stream);
}

void Gpu::hold_up_current(const GpuEvent& event) const { event.hold_up(current_stream()); }

at::Tensor Gpu::allocate(at::IntArrayRef shape, at::ScalarType type) const {
  const at::NoGradGuard no_grad;
  const OnStream on(stream_);
  return at::empty(shape, at::TensorOptions(type).device(stream_.device()));
}

void Gpu::record_use(const at::Tensor& tensor) const {
  Guard(c10::kCUDA).recordDataPtrOnStream(tensor.storage().data_ptr(), current());
}

const std::string& obstacle() {
  static const std::string none;
  static const std::string no_kernels =
      "this build of Fusewire has no CUDA kernels (`fusewire info` says why) and moves tensors of: cpu. Build it where "
      "nvcc is: FUSEWIRE_CUDA=1 pip install --no-build-isolation .";
  static const std::string no_torch = "this torch has no CUDA: install one that has";
  if (Table::instance().maker.load() == nullptr) return no_kernels;
  return c10::impl::hasDeviceGuardImpl(c10::kCUDA) ? none : no_torch;
}

Gpu& get(int index) {
  Table& table = Table::instance();
  std::atomic<Gpu*>& entry = table.gpus.at(static_cast<size_t>(index));
  if (Gpu* gpu = entry.load(std::memory_order_acquire)) return *gpu;
  if (!obstacle().empty()) throw Error(ErrorCode::kInvalidArgument, obstacle());
  const std::lock_guard lock(table.mutex);
  if (entry.load() == nullptr) entry.store(make(index), std::memory_order_release);
  return *entry.load();
}

int current_index() noexcept {
  try {
    if (!c10::impl::hasDeviceGuardImpl(c10::kCUDA)) return -1;
    const Guard guard(c10::kCUDA);
    return guard.deviceCount() > 0 ? guard.getDevice().index() : -1;
  } catch (...) {
    return -1;
  }
}

void replace_api_maker(ApiMaker maker) { Table::instance().maker.store(maker); }

}  // namespace fusewire::gpu
