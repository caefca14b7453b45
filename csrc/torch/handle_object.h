// The Python class Handle: what an asynchronous operation returns. A plain C type, because one is made per operation.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <utility>
#include <vector>

#include "torch/py_engine.h"

namespace fusewire::binding {

// What happens with the tensors of one operation once it is done.
struct Outcome {
  std::vector<at::Tensor> results;
  // Allgather, alltoall: the engine makes the results as soon as it knows their shapes, and puts them here (one per
  // tensor). finish() moves them to `results`.
  std::shared_ptr<std::vector<at::Tensor>> made;
  bool on_engine_stream = false;  // ... and it has made CUDA tensors
  bool is_list = false;           // a grouped operation answers with a list
  bool is_none = false;           // a barrier answers with None
  bool with_splits = false;       // an alltoall with splits answers with (output, rows received from each member)
  // In-place on conj() or neg() views: the plain copy that was communicated, and where it belongs.
  std::vector<std::pair<at::Tensor, at::Tensor>> copy_back;
};

// Waits without the GIL, settles the copies and returns the results as a new reference. CUDA tensors are waited for
// until the work is launched, and by the current stream from then on. Throws the operation's error.
PyObject* finish(PyEngine& engine, const Handle& handle, Outcome& outcome);

// Submits; then waits and returns the results, or returns a Handle.
PyObject* run(const PyEnginePtr& engine, Submission submission, Outcome outcome, bool wait);

PyObject* make_handle(PyEnginePtr engine, Handle handle, Outcome outcome);

void register_handle(py::module_& module);

}  // namespace fusewire::binding
