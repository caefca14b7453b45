// The operators of the pretended GPUs: all are the CPU's, but for those that make memory or say which stream uses it.
#include <ATen/EmptyTensor.h>
#include <torch/library.h>

#include <vector>

#include "fake_cuda/call.h"
#include "fake_cuda/memory.h"

namespace fusewire::fake {
namespace {

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Call(op, stack).run(); }

c10::Device device_or_current(std::optional<at::Device> device) {
  return device && device->has_index() ? *device : c10::Device(c10::DeviceType::CUDA, current_device());
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(device_or_current(device));
  const auto type = dtype.value_or(at::typeMetaToScalarType(c10::get_default_dtype()));
  return at::detail::empty_generic(size, &allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA), type, format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device_or_current(device));
  const auto type = dtype.value_or(at::typeMetaToScalarType(c10::get_default_dtype()));
  return at::detail::empty_strided_generic(size, stride, &allocator(), c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           type);
}

void record(at::Tensor& tensor, at::Stream stream) { record_stream(tensor.storage().data_ptr(), stream); }

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }
TORCH_LIBRARY_IMPL(_, SparseCUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("record_stream", &record);
  library.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

// What the CPU has a kernel of its own for gets one here too, although there is one for all devices: that one may not
// be made for a device with memory.
void register_all(c10::DispatchKey cpu, c10::DispatchKey cuda) {
  static auto* const library = new std::vector<torch::Library>;
  library->emplace_back(torch::Library::IMPL, "aten", cuda, __FILE__, __LINE__);
  c10::Dispatcher& dispatcher = c10::Dispatcher::singleton();
  for (const c10::OperatorName& name : dispatcher.getAllOpNames()) {
    const auto op = dispatcher.findSchema(name);
    if (!op || name.getNamespace() != "aten") continue;
    if (!op->hasKernelForDispatchKey(cpu) || op->hasKernelForDispatchKey(cuda)) continue;
    library->back().impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
  }
}

const bool registered = [] {
  register_all(c10::DispatchKey::CPU, c10::DispatchKey::CUDA);
  register_all(c10::DispatchKey::SparseCPU, c10::DispatchKey::SparseCUDA);
  return true;
}();

c10::Stream stream_at(int64_t device, int64_t id) { return stream_with(static_cast<c10::DeviceIndex>(device), id); }

int64_t as_number(const void* pointer) { return static_cast<int64_t>(reinterpret_cast<intptr_t>(pointer)); }

std::shared_ptr<CudaApi> api(int) { return {std::shared_ptr<void>(), &Gpu::get()}; }

// What Python needs besides.
TORCH_LIBRARY(fake_cuda, library) {
  library.def("set_device(int device) -> int", [](int64_t device) {
    return static_cast<int64_t>(exchange_device(static_cast<c10::DeviceIndex>(device)));
  });
  library.def("current_device() -> int", [] { return static_cast<int64_t>(current_device()); });
  library.def("device_count() -> int", [] { return static_cast<int64_t>(kDevices); });
  library.def("current_stream(int device) -> int",
              [](int64_t device) { return current_stream(static_cast<c10::DeviceIndex>(device)).id(); });
  library.def("set_stream(int device, int id) -> ()",
              [](int64_t device, int64_t id) { exchange_stream(stream_at(device, id)); });
  library.def("native_handle(int device, int id) -> int",
              [](int64_t device, int64_t id) { return as_number(Gpu::get().native_handle(stream_at(device, id))); });
  library.def("capture(int device, int id, bool on) -> ()", [](int64_t device, int64_t id, bool on) {
    Gpu::get().capture(Gpu::get().handle(stream_at(device, id)), on);
  });
  library.def("mistakes() -> str[]", [] { return Gpu::get().mistakes(); });
  library.def("api_maker() -> int", [] { return as_number(reinterpret_cast<const void*>(&api)); });
}

}  // namespace
}  // namespace fusewire::fake
