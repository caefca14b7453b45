// Python arguments of the METH_FASTCALL functions, checked and converted. All need the GIL and throw
// Error(kInvalidType) or Error(kInvalidArgument) with a text for the user.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/types.h"
#include "torch/py_engine.h"

namespace fusewire::binding {

[[noreturn]] void invalid(const std::string& message);     // ValueError
[[noreturn]] void wrong_type(const std::string& message);  // TypeError

void expect_arguments(const char* function, Py_ssize_t count, Py_ssize_t expected);

const at::Tensor& tensor_of(PyObject* argument);
double number_of(PyObject* argument, const char* what);
long integer_of(PyObject* argument, const char* what);
int32_t rank_of(PyObject* argument, const char* what);
uint32_t process_set_of(PyObject* argument);
std::optional<DataType> wire_of(PyObject* argument);  // None: as it is

// A name given, or the next one of that kind for None.
std::string name_of(PyObject* argument, PyEngine& engine, std::string_view kind, uint32_t process_set);

// Horovod's two ways to say it: average=True|False (old) and op=.
ReduceOp operator_of(PyObject* average, PyObject* op);

// One tensor, or a sequence of at least one: a grouped operation.
class Tensors {
 public:
  explicit Tensors(PyObject* argument);

  bool grouped() const { return grouped_; }
  const std::vector<const at::Tensor*>& all() const { return all_; }
  // The kind of the operation for unnamed calls: grouped ones are counted apart.
  std::string kind(std::string_view kind) const { return (grouped_ ? "grouped_" : "") + std::string(kind); }

 private:
  py::object list_;  // keeps the tensors of a group alive
  std::vector<const at::Tensor*> all_;
  bool grouped_ = false;
};

// One entry of a method table; the cast is CPython's own convention for METH_FASTCALL.
inline PyMethodDef method(const char* name, PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), METH_FASTCALL, nullptr};
}

}  // namespace fusewire::binding
