#include "torch/handle_object.h"

#include <ATen/Functions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <memory>

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
    return PyBool_FromLong(operation.engine->get().poll(operation.handle));
  });
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
     "wait() -> Tensor | list[Tensor] | None\n\nBlocks until the operation is done and returns its result: the input "
     "tensor itself for an in-place operation. Raises the operation's error (TensorMismatchError, PeerLostError, ...). "
     "May be called again."},
    {"done", handle_done, METH_NOARGS, "done() -> bool\n\nWhether the operation has finished or failed. Never blocks."},
    {nullptr, nullptr, 0, nullptr}};

PyType_Slot handle_slots[] = {
    {Py_tp_dealloc, reinterpret_cast<void*>(handle_dealloc)},
    {Py_tp_repr, reinterpret_cast<void*>(handle_repr)},
    {Py_tp_methods, handle_methods},
    {Py_tp_doc, const_cast<char*>("An operation in flight. It may be dropped without waiting.")},
    {0, nullptr}};

PyType_Spec handle_spec = {"fusewire._core.Handle", sizeof(HandleObject), 0,
                           Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION, handle_slots};

PyObject* wrap(const Outcome& outcome) {
  if (outcome.is_none) Py_RETURN_NONE;
  if (!outcome.is_list) return THPVariable_Wrap(outcome.results.front());
  py::list list(outcome.results.size());
  for (size_t i = 0; i < outcome.results.size(); ++i) {
    PyObject* item = THPVariable_Wrap(outcome.results[i]);
    if (item == nullptr) throw py::error_already_set();
    PyList_SET_ITEM(list.ptr(), static_cast<Py_ssize_t>(i), item);
  }
  return list.release().ptr();
}

}  // namespace

PyObject* finish(PyEngine& engine, const Handle& handle, Outcome& outcome) {
  if (!handle->done() || !handle->ok()) {
    py::gil_scoped_release no_gil;
    engine.get().wait(handle, check_signals);
  }
  handle->drop_keep_alive();
  if (!outcome.copy_back.empty()) {
    at::NoGradGuard no_grad;
    for (const auto& [from, to] : outcome.copy_back) to.copy_(from);
    outcome.copy_back.clear();
  }
  return wrap(outcome);
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
