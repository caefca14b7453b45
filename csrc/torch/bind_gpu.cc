#include "torch/bind_gpu.h"

#include <cstdint>
#include <cstring>
#include <optional>
#include <string>

#include "torch/arguments.h"
#include "torch/gpu.h"

namespace fusewire::binding {
namespace {

void set_cuda_api(const py::capsule& capsule) {
  if (capsule.name() == nullptr || std::strcmp(capsule.name(), "fusewire.cuda_api") != 0) {
    wrong_type("expected a capsule named 'fusewire.cuda_api'");
  }
  gpu::replace_api_maker(reinterpret_cast<gpu::ApiMaker>(capsule.get_pointer()));
}

template <class T>
T* elements(const at::Tensor& tensor, at::ScalarType type, uint64_t least) {
  if (!tensor.is_cuda() || !tensor.is_contiguous() || tensor.scalar_type() != type ||
      static_cast<uint64_t>(tensor.numel()) < least) {
    invalid("expected a contiguous CUDA tensor of at least " + std::to_string(least) + " elements of type " +
            at::toString(type));
  }
  return static_cast<T*>(tensor.mutable_data_ptr());
}

uint64_t blocks_of(const at::Tensor& values, uint32_t block) {
  if (block == 0) invalid("expected a block of at least one value");
  return (static_cast<uint64_t>(values.numel()) + block - 1) / block;
}

void quantise(const at::Tensor& values, const at::Tensor& quantised, const at::Tensor& scales,
              const std::optional<at::Tensor>& left, uint32_t block) {
  const uint64_t blocks = blocks_of(values, block);
  DeviceQuantiseArgs args;
  args.count = static_cast<uint64_t>(values.numel());
  args.values = elements<float>(values, at::kFloat, args.count);
  args.block = block;
  args.quantised = elements<int8_t>(quantised, at::kChar, blocks * block);
  args.scales = elements<float>(scales, at::kFloat, blocks);
  if (left) args.error_out = elements<float>(*left, at::kFloat, args.count);
  const gpu::Gpu& gpu = gpu::get(values.get_device());
  args.stream = gpu.current_stream();
  gpu.device()->api().quantise(args);
}

void add_quantised(const at::Tensor& total, const at::Tensor& quantised, const at::Tensor& scales, uint32_t block) {
  const uint64_t blocks = blocks_of(total, block);
  DeviceDequantiseArgs args;
  args.count = static_cast<uint64_t>(total.numel());
  args.total = elements<float>(total, at::kFloat, args.count);
  args.block = block;
  args.quantised = elements<int8_t>(quantised, at::kChar, blocks * block);
  args.scales = elements<float>(scales, at::kFloat, blocks);
  const gpu::Gpu& gpu = gpu::get(total.get_device());
  args.stream = gpu.current_stream();
  gpu.device()->api().dequantise(args);
}

}  // namespace

void register_gpu(py::module_& module) {
  module.def(
      "cuda_obstacle", [] { return gpu::obstacle(); },
      "Why CUDA tensors cannot be communicated by this build and this torch; '' where they can.");
  module.def(
      "_set_cuda_api", set_cuda_api, py::arg("capsule"),
      "For tests: the capsule, named 'fusewire.cuda_api', holds a `std::shared_ptr<CudaApi> (*)(int device)` that "
      "is asked instead of CUDA. To be called before anything else of Fusewire's.");
  const py::call_guard<py::gil_scoped_release> no_gil;
  module.def("quantise", quantise, py::arg("values"), py::arg("quantised"), py::arg("scales"), py::arg("left"),
             py::arg("block"), no_gil,
             "For the int8 compressor, on the current stream: float32 values as int8 multiples of one scale per block, "
             "padded to whole blocks; what rounding has lost goes to `left`, if not None.");
  module.def("add_quantised", add_quantised, py::arg("total"), py::arg("quantised"), py::arg("scales"),
             py::arg("block"), no_gil, "The way back: adds what they stand for to a float32 tensor.");
}

}  // namespace fusewire::binding
