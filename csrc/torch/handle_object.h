// The Python class Handle: what an asynchronous operation returns. A plain C type, because one is made per operation.
#pragma once

#include <ATen/core/Tensor.h>

#include <utility>
#include <vector>

#include "torch/py_engine.h"

namespace fusewire::binding {

// What happens with the tensors of one operation once it is done.
struct Outcome {
  std::vector<at::Tensor> results;
  bool is_list = false;  // a grouped operation answers with a list
  bool is_none = false;  // a barrier answers with None
  // In-place on conj() or neg() views: the plain copy that was communicated, and where it belongs.
  std::vector<std::pair<at::Tensor, at::Tensor>> copy_back;
};

// Waits without the GIL, settles the copies and returns the results as a new reference. Throws the operation's error.
PyObject* finish(PyEngine& engine, const Handle& handle, Outcome& outcome);

PyObject* make_handle(PyEnginePtr engine, Handle handle, Outcome outcome);

void register_handle(py::module_& module);

}  // namespace fusewire::binding
