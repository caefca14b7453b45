#include "torch/python_errors.h"

#include <torch/csrc/Exceptions.h>

#include <string>

namespace fusewire::binding {
namespace {

py::object exception_class(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument:
      return py::reinterpret_borrow<py::object>(PyExc_ValueError);
    case ErrorCode::kInvalidType:
      return py::reinterpret_borrow<py::object>(PyExc_TypeError);
    default:
      return py::module_::import("fusewire.errors").attr(std::string(to_string(code)).c_str());
  }
}

void set_python_error(const Error& error) {
  const py::object type = exception_class(error.code());
  py::object value = type(error.what());
  if (py::hasattr(type, "rank"))
    value.attr("rank") = error.rank() < 0 ? py::object(py::none()) : py::int_(error.rank());
  PyErr_SetObject(type.ptr(), value.ptr());
}

}  // namespace

void set_python_error(std::exception_ptr error) noexcept {
  try {
    std::rethrow_exception(error);
  } catch (const Error& own) {
    try {
      set_python_error(own);
    } catch (py::error_already_set& nested) {  // fusewire.errors cannot be imported (the interpreter shuts down)
      nested.restore();
    }
  } catch (py::error_already_set& python) {
    python.restore();
  } catch (python_error& python) {
    python.restore();
  } catch (...) {
    torch::translate_exception_to_python(std::current_exception());
  }
}

void throw_through_autograd(std::exception_ptr error) {
  py::gil_scoped_acquire gil;
  set_python_error(std::move(error));
  python_error carried;
  carried.persist();
  throw carried;
}

void check_signals() {
  py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

void register_errors(py::module_&) {
  py::register_local_exception_translator([](std::exception_ptr error) {
    try {
      if (error) std::rethrow_exception(error);
    } catch (const Error&) {
      set_python_error(std::current_exception());
    } catch (const c10::Error&) {
      set_python_error(std::current_exception());
    } catch (python_error& python) {
      python.restore();
    }
  });
}

}  // namespace fusewire::binding
