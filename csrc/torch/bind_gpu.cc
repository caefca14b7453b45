#include "torch/bind_gpu.h"

#include <cstring>

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

}  // namespace

void register_gpu(py::module_& module) {
  module.def(
      "cuda_obstacle", [] { return gpu::obstacle(); },
      "Why CUDA tensors cannot be communicated by this build and this torch; '' where they can.");
  module.def(
      "_set_cuda_api", set_cuda_api, py::arg("capsule"),
      "For tests: the capsule, named 'fusewire.cuda_api', holds a `std::shared_ptr<CudaApi> (*)(int device)` that "
      "is asked instead of CUDA. To be called before anything else of Fusewire's.");
}

}  // namespace fusewire::binding
