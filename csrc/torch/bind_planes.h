#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fusewire::binding {

// What is known of data planes that may be missing.
void register_planes(pybind11::module_& module);

}  // namespace fusewire::binding
