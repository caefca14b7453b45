// Allreduce and broadcast for Python: results have the shape of the input.
#include "torch/bind_ops.h"

#include <algorithm>
#include <optional>

#include "torch/arguments.h"
#include "torch/handle_object.h"
#include "torch/python_errors.h"
#include "torch/tensor_adapter.h"

namespace fusewire::binding {
namespace {

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

// allreduce(engine, tensor or sequence, in_place, average, op, prescale, postscale, process_set_id, name, wire, wait)
PyObject* allreduce(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("allreduce", count, 11);
    PyEnginePtr holder;
    const PyEnginePtr& engine = engine_of(args[0], holder);
    const Tensors tensors(args[1]);
    const bool in_place = args[2] == Py_True;
    Submission submission;
    submission.kind = OpKind::kAllreduce;
    submission.op = operator_of(args[3], args[4]);
    submission.prescale = number_of(args[5], "prescale_factor");
    submission.postscale = number_of(args[6], "postscale_factor");
    submission.process_set = process_set_of(args[7]);
    const std::optional<DataType> wire = wire_of(args[9]);
    Outcome outcome;
    outcome.is_list = tensors.grouped();
    std::vector<at::Tensor> alive;
    alive.reserve(2 * tensors.all().size());
    submission.tensors.reserve(tensors.all().size());
    for (const at::Tensor* tensor : tensors.all()) add_tensor(*tensor, in_place, wire, submission, outcome, alive);
    submission.name = name_of(args[8], *engine, tensors.kind("allreduce"), submission.process_set);
    submission.keep_alive = adapter::keep_alive(alive);
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
    submission.root = rank_of(args[3], "root_rank");
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

}  // namespace

void register_ops(py::module_& module) {
  static PyMethodDef methods[] = {
      method("allreduce", allreduce), method("broadcast", broadcast), {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(module.ptr(), methods) != 0) throw py::error_already_set();
}

}  // namespace fusewire::binding
