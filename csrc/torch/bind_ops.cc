// The collectives for Python, as METH_FASTCALL functions with positional arguments: a training step makes hundreds of
// these calls, and pybind11's dispatch would cost as much as the rest of a submission.
#include "torch/bind_ops.h"

#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <optional>

#include "torch/handle_object.h"
#include "torch/python_errors.h"
#include "torch/tensor_adapter.h"

namespace fusewire::binding {
namespace {

[[noreturn]] void invalid(const std::string& message) { throw Error(ErrorCode::kInvalidArgument, message); }
[[noreturn]] void wrong_type(const std::string& message) { throw Error(ErrorCode::kInvalidType, message); }

void expect_arguments(const char* function, Py_ssize_t count, Py_ssize_t expected) {
  if (count != expected) wrong_type(std::string("_core.") + function + ": wrong number of arguments");
}

const at::Tensor& tensor_of(PyObject* argument) {
  if (!THPVariable_Check(argument)) {
    wrong_type(std::string("expected a torch.Tensor, got ") + Py_TYPE(argument)->tp_name);
  }
  return THPVariable_Unpack(argument);
}

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

uint32_t process_set_of(PyObject* argument) {
  if (argument == Py_None) invalid("the process set is not registered; pass it to init() or add_process_set() first");
  return static_cast<uint32_t>(integer_of(argument, "process_set_id"));
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

// Horovod's two ways to say it: average=True|False (old) and op=.
ReduceOp operator_of(PyObject* average, PyObject* op) {
  if (op == Py_None) return average == Py_None || PyObject_IsTrue(average) ? ReduceOp::kAverage : ReduceOp::kSum;
  if (average != Py_None) invalid("give either average= or op=, not both");
  const long code = integer_of(op, "op");
  if (code < 0 || code >= kReduceOpCount) {
    PyErr_SetString(PyExc_NotImplementedError,
                    "this operator is not available here; allowed: Average, Sum, Min, Max, Product");
    throw py::error_already_set();
  }
  return static_cast<ReduceOp>(code);
}

// Adds one tensor to the operation: what is read, where the result goes, what the caller gets.
void add_tensor(const at::Tensor& tensor, bool in_place, std::optional<DataType> wire, Submission& submission,
                Outcome& outcome, std::vector<at::Tensor>& alive) {
  adapter::check_dense(tensor);
  const at::Tensor input = adapter::resolved(tensor);
  at::Tensor output = input;
  if (in_place) {
    if (adapter::overlaps_itself(tensor)) {
      invalid(
          "an in-place operation needs a tensor whose elements do not share memory (this one was expanded, or is "
          "a view that overlaps itself); pass tensor.contiguous()");
    }
    adapter::bump_version(tensor);
    if (!input.is_same(tensor)) outcome.copy_back.emplace_back(input, tensor);
    outcome.results.push_back(tensor);
  } else {
    output = adapter::uninitialized_like(input);
    outcome.results.push_back(output);
  }
  SubmittedTensor& submitted = submission.tensors.emplace_back();
  submitted.output = adapter::write_view(output);
  submitted.input = in_place ? submitted.output : adapter::read_view(input);
  submitted.wire = adapter::wire_type(submitted.input.dtype, wire);
  alive.push_back(input);
  if (!in_place) alive.push_back(output);
}

PyObject* run(const PyEnginePtr& engine, Submission submission, Outcome outcome, bool wait) {
  Handle handle = engine->get().submit(std::move(submission), !wait);
  return wait ? finish(*engine, handle, outcome) : make_handle(engine, std::move(handle), std::move(outcome));
}

// allreduce(engine, tensor or sequence, in_place, average, op, prescale, postscale, process_set_id, name, wire, wait)
PyObject* allreduce(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("allreduce", count, 11);
    PyEnginePtr holder;
    const PyEnginePtr& engine = engine_of(args[0], holder);
    const bool in_place = args[2] == Py_True;
    Submission submission;
    submission.kind = OpKind::kAllreduce;
    submission.op = operator_of(args[3], args[4]);
    submission.prescale = number_of(args[5], "prescale_factor");
    submission.postscale = number_of(args[6], "postscale_factor");
    submission.process_set = process_set_of(args[7]);
    std::optional<DataType> wire;
    if (args[9] != Py_None) wire = static_cast<DataType>(integer_of(args[9], "wire"));
    Outcome outcome;
    if (THPVariable_Check(args[1])) {
      submission.name = name_of(args[8], *engine, "allreduce", submission.process_set);
      std::vector<at::Tensor> alive;
      add_tensor(tensor_of(args[1]), in_place, wire, submission, outcome, alive);
      submission.keep_alive = adapter::keep_alive(alive);
    } else {
      const py::object list =
          py::reinterpret_steal<py::object>(PySequence_Fast(args[1], "expected a torch.Tensor or a sequence of them"));
      if (!list) throw py::error_already_set();
      const Py_ssize_t size = PySequence_Fast_GET_SIZE(list.ptr());
      outcome.is_list = true;
      outcome.results.reserve(static_cast<size_t>(size));
      submission.tensors.reserve(static_cast<size_t>(size));
      std::vector<at::Tensor> alive;
      alive.reserve(static_cast<size_t>(2 * size));
      for (Py_ssize_t i = 0; i < size; ++i) {
        add_tensor(tensor_of(PySequence_Fast_GET_ITEM(list.ptr(), i)), in_place, wire, submission, outcome, alive);
      }
      if (size == 0) invalid("a grouped operation needs at least one tensor");
      submission.name = name_of(args[8], *engine, "grouped_allreduce", submission.process_set);
      submission.keep_alive = adapter::keep_alive(alive);
    }
    return run(engine, std::move(submission), std::move(outcome), args[10] == Py_True);
  });
}

// broadcast(engine, tensor, in_place, root_rank, process_set_id, name, wait)
PyObject* broadcast(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("broadcast", count, 7);
    PyEnginePtr holder;
    const PyEnginePtr& engine = engine_of(args[0], holder);
    const at::Tensor& tensor = tensor_of(args[1]);
    Submission submission;
    submission.kind = OpKind::kBroadcast;
    submission.root = static_cast<int32_t>(integer_of(args[3], "root_rank"));
    submission.process_set = process_set_of(args[4]);
    const std::vector<int32_t> members = engine->get().members(submission.process_set);
    if (!std::binary_search(members.begin(), members.end(), submission.root)) {
      invalid("root_rank=" + std::to_string(submission.root) +
              " is not a member of the process set; allowed: " + to_string(Dims(members.begin(), members.end())));
    }
    Outcome outcome;
    std::vector<at::Tensor> alive;
    add_tensor(tensor, args[2] == Py_True, std::nullopt, submission, outcome, alive);
    submission.name = name_of(args[5], *engine, "broadcast", submission.process_set);
    submission.keep_alive = adapter::keep_alive(alive);
    return run(engine, std::move(submission), std::move(outcome), args[6] == Py_True);
  });
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

// add_process_set(engine, sorted global ranks) -> id
PyObject* add_process_set(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("add_process_set", count, 2);
    PyEnginePtr holder;
    const PyEnginePtr& engine = engine_of(args[0], holder);
    Submission submission;
    submission.kind = OpKind::kAddProcessSet;
    submission.ranks = py::cast<std::vector<int32_t>>(py::handle(args[1]));
    submission.name = engine->unnamed("add_process_set", 0);
    Handle handle = engine->get().submit(std::move(submission), false);
    {
      py::gil_scoped_release no_gil;
      engine->get().wait(handle, check_signals);
    }
    return PyLong_FromUnsignedLong(handle->created_set());
  });
}

// One entry of a method table; the cast is CPython's own convention for METH_FASTCALL.
PyMethodDef method(const char* name, PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)), METH_FASTCALL, nullptr};
}

}  // namespace

void register_ops(py::module_& module) {
  static PyMethodDef methods[] = {method("allreduce", allreduce),
                                  method("broadcast", broadcast),
                                  method("barrier", barrier),
                                  method("add_process_set", add_process_set),
                                  {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(module.ptr(), methods) != 0) throw py::error_already_set();
}

}  // namespace fusewire::binding
