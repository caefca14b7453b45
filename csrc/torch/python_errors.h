// C++ errors as Python exceptions: Error's code names the class in fusewire.errors (or ValueError, TypeError).
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <exception>

#include "common/error.h"

namespace fusewire::binding {

// Sets the Python error for `error` (any C++ exception; one of torch's or pybind11's keeps its own class). Needs the
// GIL.
void set_python_error(std::exception_ptr error) noexcept;

// For threads of torch's autograd: the exception that backward() raises as the Python class it stands for. Takes the
// GIL.
[[noreturn]] void throw_through_autograd(std::exception_ptr error);

// For Engine::wait: lets Python's signal handlers run, and throws what they raise (KeyboardInterrupt). Takes the GIL.
void check_signals();

// Runs `body`, which returns a new reference; an exception becomes the Python error and nullptr.
template <class Body>
PyObject* guarded(Body&& body) noexcept {
  try {
    return body();
  } catch (...) {
    set_python_error(std::current_exception());
    return nullptr;
  }
}

void register_errors(py::module_& module);

}  // namespace fusewire::binding
