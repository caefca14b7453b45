#include "torch/handle_object.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <memory>

#include "torch/gpu_order.h"
#include "torch/profile.h"
#include "torch/python_errors.h"

namespace fusewire::binding {
namespace {

struct Operation {
  PyEnginePtr engine;
  Handle handle;
  Outcome outcome;
};

struct HandleObject {
  PyObject_HEAD Operation* operation;  // owned
};

PyTypeObject* handle_type = nullptr;

Operation& operation_of(PyObject* self) { return *reinterpret_cast<HandleObject*>(self)->operation; }

PyObject* handle_wait(PyObject* self, PyObject*) {
  return guarded([self] {
    Operation& operation = operation_of(self);
    return finish(*operation.engine, operation.handle, operation.outcome);
  });
}

PyObject* handle_done(PyObject* self, PyObject*) {
  return guarded([self]() -> PyObject* {
    Operation& operation = operation_of(self);
    return PyBool_FromLong(operation.engine->get().poll(operation.handle) && operation.handle->reached());
  });
}

PyObject* handle_extents(PyObject* self, PyObject*) {
  return guarded([self] { return py::cast(operation_of(self).handle->extents()).release().ptr(); });
}

PyObject* handle_repr(PyObject* self) {
  return PyUnicode_FromFormat("<fusewire.Handle %s>", operation_of(self).handle->done() ? "done" : "pending");
}

void handle_dealloc(PyObject* self) {
  delete reinterpret_cast<HandleObject*>(self)->operation;
  PyTypeObject* type = Py_TYPE(self);
  type->tp_free(self);
  Py_DECREF(type);
}

PyMethodDef handle_methods[] = {
    {"wait", handle_wait, METH_NOARGS,
     "wait() -> Tensor | list[Tensor] | tuple[Tensor, Tensor] | None\n\nBlocks until the operation is done and returns "
     "its result: the input tensor itself for an in-place operation. Of CUDA tensors, until all ranks have agreed and "
     "the work is launched: the caller's current stream then waits for it, the caller does not. Raises the operation's "
     "error (TensorMismatchError, PeerLostError, ...). May be called again, also with another stream current."},
    {"done", handle_done, METH_NOARGS,
     "done() -> bool\n\nWhether the operation has finished or failed, on the GPU as well. Never blocks."},
    {"_extents", handle_extents, METH_NOARGS,
     "_extents() -> list[int]\n\nOnce done: how many rows came from each member, for one tensor after the other."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot handle_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(handle_dealloc)},
    {Py_tp_repr, reinterpret_cast<void*>(handle_repr)},
    {Py_tp_methods, handle_methods},
    {Py_tp_doc, const_cast<char*>("An operation in flight. It may be dropped without waiting.")},
    {0, nullptr}};

PyType_Spec handle_spec = {"fusewire._core.Handle", sizeof(HandleObject), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, handle_slots};

PyObject* wrap_with_splits(const at::Tensor& result, const std::vector<int64_t>& received) {
  const auto output = py::reinterpret_steal<py::object>(THPVariable_Wrap(result));
  if (!output) throw py::error_already_set();
  at::Tensor splits(at::detail::empty_cpu({static_cast<int64_t>(received.size())}, at::kInt));
  std::transform(received.begin(), received.end(), static_cast<int32_t*>(splits.mutable_data_ptr()),
                 [](int64_t rows) { return static_cast<int32_t>(rows); });
  const auto second = py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(splits)));
  if (!second) throw py::error_already_set();
  return PyTuple_Pack(2, output.ptr(), second.ptr());
}

PyObject* wrap(const Outcome& outcome, const HandleState& handle) {
  if (outcome.is_none) Py_RETURN_NONE;
  if (outcome.with_splits) return wrap_with_splits(outcome.results.front(), handle.extents());
  if (!outcome.is_list) return THPVariable_Wrap(outcome.results.front());
  py::list list(outcome.results.size());
  for (size_t i = 0; i < outcome.results.size(); ++i) {
    PyObject* item = THPVariable_Wrap(outcome.results[i]);
    if (item == nullptr) throw py::error_already_set();
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), item);
  }
  return list.release().ptr();
}

// For the current stream: waits for the results, and uses their memory from now on.
void hold_up_current(PyEngine& engine, const Outcome& outcome, const Handle& handle) {
  if (!handle->event()) [[likely]]
    return;
  gpu::hold_up_current(engine, {&handle, 1});
  if (!outcome.on_engine_stream) return;
  for (const at::Tensor& tensor : outcome.results) {
    if (tensor.is_cuda()) engine.gpu().record_use(tensor);
  }
}

}  // namespace

PyObject* finish(PyEngine& engine, const Handle& handle, Outcome& outcome) {
  if (!handle->done() || !handle->ok()) {
    py::gil_scoped_release no_gil;
    engine.get().wait(handle, check_signals);
  }
  if (outcome.made) outcome.results = std::move(*std::exchange(outcome.made, nullptr));
  hold_up_current(engine, outcome, handle);
  handle->drop_keep_alive();
  if (!outcome.copy_back.empty()) {
    at::NoGradGuard no_grad;
    for (const auto& [from, to] : outcome.copy_back) to.copy_(from);
    outcome.copy_back.clear();
  }
  return wrap(outcome, *handle);
}

PyObject* run(const PyEnginePtr& engine, Submission submission, Outcome outcome, bool wait) {
  gpu::follow_current(*engine, submission);
  profile(submission);
  Handle handle = engine->get().submit(std::move(submission), !wait);
  return wait ? finish(*engine, handle, outcome) : make_handle(engine, std::move(handle), std::move(outcome));
}

PyObject* make_handle(PyEnginePtr engine, Handle handle, Outcome outcome) {
  auto operation = std::make_unique<Operation>(Operation{std::move(engine), std::move(handle), std::move(outcome)});
  PyObject* self = handle_type->tp_alloc(handle_type, 0);
  if (self == nullptr) throw py::error_already_set();
  reinterpret_cast<HandleObject*>(self)->operation = operation.release();
  return self;
}

void register_handle(py::module_& module) {
  const auto type = py::reinterpret_steal<py::object>(PyType_FromSpec(&handle_spec));
  if (!type) throw py::error_already_set();
  module.attr("Handle") = type;
  handle_type = reinterpret_cast<PyTypeObject*>(type.inc_ref().ptr());  // lives as long as the process
}

}  // namespace fusewire::binding
