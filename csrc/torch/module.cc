// The extension module fusewire._core: calls one register function per part.
#include <torch/csrc/utils/pybind.h>

#include "common/types.h"
#include "kernels/cuda_kernels.h"
#include "kernels/kernels.h"
#include "torch/bind_gpu.h"
#include "torch/bind_hooks.h"
#include "torch/bind_kernels.h"
#include "torch/bind_ops.h"
#include "torch/bind_planes.h"
#include "torch/handle_object.h"
#include "torch/py_engine.h"
#include "torch/python_errors.h"
#include "torch/stacks.h"

namespace fusewire::binding {
namespace {

// The numbers that Python passes for operators and wire types.
void register_codes(py::module_& module) {
  const auto op = [&](const char* name, ReduceOp code) { module.attr(name) = static_cast<int>(code); };
  op("SUM", ReduceOp::kSum);
  op("AVERAGE", ReduceOp::kAverage);
  op("MIN", ReduceOp::kMin);
  op("MAX", ReduceOp::kMax);
  op("PRODUCT", ReduceOp::kProduct);
  op("ADASUM", ReduceOp::kAdasum);
  module.attr("FLOAT16") = static_cast<int>(DataType::kFloat16);
  module.attr("BFLOAT16") = static_cast<int>(DataType::kBFloat16);
}

// The kernels that nvcc has compiled into this module, or null.
const CudaKernels* cuda_kernels() {
#ifdef FUSEWIRE_WITH_CUDA
  return &kCudaKernels;
#else
  return nullptr;
#endif
}

}  // namespace
}  // namespace fusewire::binding

PYBIND11_MODULE(_core, module) {
  using namespace fusewire::binding;
  module.doc() = "The C++ part of Fusewire. Use the functions of the package fusewire instead.";
  module.def("isa", [] { return std::string(fusewire::cpu_kernels().isa); }, "The instruction set of the CPU kernels.");
  module.def(
      "has_cuda_kernels", [] { return cuda_kernels() != nullptr && cuda_kernels()->pack != nullptr; },
      "Whether the CUDA kernels were compiled in.");
  register_errors(module);
  register_codes(module);
  register_engine(module);
  register_handle(module);
  register_ops(module);
  register_gather(module);
  register_sets(module);
  register_hooks(module);
  register_stacks(module);
  register_planes(module);
  register_gpu(module);
  register_kernels(module);
}
