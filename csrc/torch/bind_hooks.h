// GradReducer for Python.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fusewire::binding {

void register_hooks(py::module_& module);

}  // namespace fusewire::binding
