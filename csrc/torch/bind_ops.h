// The collectives for Python.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fusewire::binding {

void register_ops(py::module_& module);

}  // namespace fusewire::binding
