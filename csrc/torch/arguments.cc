#include "torch/arguments.h"

#include <torch/csrc/autograd/python_variable.h>

#include <utility>

#include "common/error.h"

namespace fusewire::binding {

void invalid(const std::string& message) { throw Error(ErrorCode::kInvalidArgument, message); }
void wrong_type(const std::string& message) { throw Error(ErrorCode::kInvalidType, message); }

void expect_arguments(const char* function, Py_ssize_t count, Py_ssize_t expected) {
  if (count != expected) wrong_type(std::string("_core.") + function + ": wrong number of arguments");
}

const at::Tensor& tensor_of(PyObject* argument) {
  if (!THPVariable_Check(argument)) {
    wrong_type(std::string("expected a torch.Tensor, got ") + Py_TYPE(argument)->tp_name);
  }
  return THPVariable_Unpack(argument);
}

namespace {

// A number that no process set or rank can have must not become one that some have.
template <typename T>
T narrow(long value, const char* what) {
  if (!std::in_range<T>(value)) invalid(std::string(what) + "=" + std::to_string(value) + " is out of range");
  return static_cast<T>(value);
}

}  // namespace

double number_of(PyObject* argument, const char* what) {
  const double value = PyFloat_AsDouble(argument);
  if (value == -1.0 && PyErr_Occurred()) {
    PyErr_Clear();
    wrong_type(std::string(what) + " must be a number, got " + Py_TYPE(argument)->tp_name);
  }
  return value;
}

long integer_of(PyObject* argument, const char* what) {
  const long value = PyLong_AsLong(argument);
  if (value == -1 && PyErr_Occurred()) {
    PyErr_Clear();
    wrong_type(std::string(what) + " must be an integer, got " + Py_TYPE(argument)->tp_name);
  }
  return value;
}

int32_t rank_of(PyObject* argument, const char* what) { return narrow<int32_t>(integer_of(argument, what), what); }

uint32_t process_set_of(PyObject* argument) {
  if (argument == Py_None) {
    invalid(
        "the process set is not registered, or was removed; pass it to init() or add_process_set() before using it");
  }
  return narrow<uint32_t>(integer_of(argument, "process_set_id"), "process_set_id");
}

std::optional<DataType> wire_of(PyObject* argument) {
  if (argument == Py_None) return std::nullopt;
  return static_cast<DataType>(integer_of(argument, "wire"));
}

std::string name_of(PyObject* argument, PyEngine& engine, std::string_view kind, uint32_t process_set) {
  if (argument == Py_None) return engine.unnamed(kind, process_set);
  Py_ssize_t length = 0;
  const char* text = PyUnicode_Check(argument) ? PyUnicode_AsUTF8AndSize(argument, &length) : nullptr;
  if (text == nullptr) {
    PyErr_Clear();
    wrong_type(std::string("name must be a string, got ") + Py_TYPE(argument)->tp_name);
  }
  return std::string(text, static_cast<size_t>(length));
}

ReduceOp operator_of(PyObject* average, PyObject* op) {
  if (op == Py_None) return average == Py_None || PyObject_IsTrue(average) ? ReduceOp::kAverage : ReduceOp::kSum;
  if (average != Py_None) invalid("give either average= or op=, not both");
  const long code = integer_of(op, "op");
  if (code < 0 || code >= kReduceOpCount) {
    invalid("op=" + std::to_string(code) + " is no operator; allowed: Average, Sum, Min, Max, Product, Adasum");
  }
  return static_cast<ReduceOp>(code);
}

Tensors::Tensors(PyObject* argument) {
  if (THPVariable_Check(argument)) {
    all_.push_back(&THPVariable_Unpack(argument));
    return;
  }
  grouped_ = true;
  list_ = py::reinterpret_steal<py::object>(PySequence_Fast(argument, "expected a torch.Tensor or a sequence of them"));
  if (!list_) throw py::error_already_set();
  const Py_ssize_t size = PySequence_Fast_GET_SIZE(list_.ptr());
  if (size == 0) invalid("a grouped operation needs at least one tensor");
  all_.reserve(static_cast<size_t>(size));
  for (Py_ssize_t i = 0; i < size; ++i) all_.push_back(&tensor_of(PySequence_Fast_GET_ITEM(list_.ptr(), i)));
}

}  // namespace fusewire::binding
