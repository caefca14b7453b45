// The CUDA kernels by themselves, for tests on a GPU and for benchmarks.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fusewire::binding {

void register_kernels(py::module_& module);

}  // namespace fusewire::binding
