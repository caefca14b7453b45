// Barrier, join and process sets for Python: operations without tensors.
#include <utility>

#include "torch/arguments.h"
#include "torch/bind_ops.h"
#include "torch/handle_object.h"
#include "torch/profile.h"
#include "torch/python_errors.h"

namespace fusewire::binding {
namespace {

Handle submit_and_wait(PyEngine& engine, Submission submission) {
  profile(submission);
  Handle handle = engine.get().submit(std::move(submission), false);
  const py::gil_scoped_release no_gil;
  engine.get().wait(handle, check_signals);
  return handle;
}

// barrier(engine, process_set_id, wait)
PyObject* barrier(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("barrier", count, 3);
    PyEnginePtr holder;
    const PyEnginePtr& engine = engine_of(args[0], holder);
    Submission submission;
    submission.kind = OpKind::kBarrier;
    submission.process_set = process_set_of(args[1]);
    submission.name = engine->unnamed("barrier", submission.process_set);
    Outcome outcome;
    outcome.is_none = true;
    return run(engine, std::move(submission), std::move(outcome), args[2] == Py_True);
  });
}

// join(engine, device) -> the last rank to join. Where this rank has used no GPU, operations of the others may need
// one: the device, or the current one for -1.
PyObject* join(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("join", count, 2);
    PyEnginePtr holder;
    const PyEnginePtr& engine = engine_of(args[0], holder);
    const auto device = static_cast<int>(rank_of(args[1], "device"));
    engine->expect_gpu(device >= 0 ? device : gpu::current_index());
    Submission submission;
    submission.kind = OpKind::kJoin;
    const Handle handle = submit_and_wait(*engine, std::move(submission));
    engine->recount_unnamed();
    return PyLong_FromLongLong(handle->extents().at(0));
  });
}

// add_process_set(engine, sorted global ranks) -> id; adopt_process_set(engine, sorted global ranks) -> id
PyObject* make_set(const char* function, OpKind kind, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments(function, count, 2);
    PyEnginePtr holder;
    const PyEnginePtr& engine = engine_of(args[0], holder);
    Submission submission;
    submission.kind = kind;
    submission.ranks = py::cast<std::vector<int32_t>>(py::handle(args[1]));
    if (kind == OpKind::kAddProcessSet) submission.name = engine->unnamed(function, 0);  // an adoption has its own
    return PyLong_FromUnsignedLong(submit_and_wait(*engine, std::move(submission))->created_set());
  });
}

PyObject* add_process_set(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return make_set("add_process_set", OpKind::kAddProcessSet, args, count);
}

PyObject* adopt_process_set(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return make_set("adopt_process_set", OpKind::kAdoptProcessSet, args, count);
}

// remove_process_set(engine, process_set_id)
PyObject* remove_process_set(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    expect_arguments("remove_process_set", count, 2);
    PyEnginePtr holder;
    const PyEnginePtr& engine = engine_of(args[0], holder);
    Submission submission;
    submission.kind = OpKind::kRemoveProcessSet;
    submission.process_set = process_set_of(args[1]);
    submission.name = engine->unnamed("remove_process_set", 0);
    submit_and_wait(*engine, std::move(submission));
    Py_RETURN_NONE;
  });
}

}  // namespace

void register_sets(py::module_& module) {
  static PyMethodDef methods[] = {method("barrier", barrier),
                                  method("join", join),
                                  method("add_process_set", add_process_set),
                                  method("adopt_process_set", adopt_process_set),
                                  method("remove_process_set", remove_process_set),
                                  {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(module.ptr(), methods) != 0) throw py::error_already_set();
}

}  // namespace fusewire::binding
