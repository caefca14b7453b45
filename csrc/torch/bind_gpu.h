// What Python asks about this process's GPUs.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fusewire::binding {

void register_gpu(py::module_& module);

}  // namespace fusewire::binding
