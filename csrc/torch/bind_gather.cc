// Allgather, alltoall and reduce-scatter for Python: ranks bring or take different rows, along the first dimension.
#include <ATen/Functions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "torch/arguments.h"
#include "torch/bind_ops.h"
#include "torch/handle_object.h"
#include "torch/python_errors.h"
#include "torch/tensor_adapter.h"

namespace fusewire::binding {
namespace {

using Tensor = at::Tensor;

// Members of a process set, and which of them this rank is (none: the engine refuses the operation).
struct Place {
  Place(PyEngine& engine, uint32_t process_set) {
    const std::vector<int32_t> members = engine.get().members(process_set);
    const auto mine = std::find(members.begin(), members.end(), engine.get().rank());
    size = members.size();
    if (mine != members.end()) index = static_cast<size_t>(mine - members.begin());
  }
  size_t size;
  std::optional<size_t> index;
};

// What the engine needs to read a tensor, and what keeps all of them alive until it has.
struct Inputs {
  std::vector<Tensor> alive;

  SubmittedTensor& add(const Tensor& tensor, Submission& submission) {
    SubmittedTensor& submitted = submission.tensors.emplace_back();
    submitted.input = adapter::read_view(tensor);
    submitted.wire = submitted.input.dtype;
    alive.push_back(tensor);
    return submitted;
  }
};

Tensor checked(const Tensor& tensor) {
  adapter::check_dense(tensor);
  return adapter::resolved(tensor);
}

Tensor with_rows(const Tensor& tensor, const char* what) {
  if (tensor.defined() && tensor.dim() == 0) {
    invalid(std::string(what) + " cuts the first dimension, and this tensor has none; pass tensor.reshape(1)");
  }
  return checked(tensor);
}

// Results that the engine makes when their shapes are known: those on a GPU on its own stream, see Note [Streams of a
// GPU].
void let_engine_allocate(PyEngine& engine, Submission& submission, Outcome& outcome, Inputs inputs) {
  struct Memory {
    std::vector<c10::Storage> storages;
    std::shared_ptr<std::vector<Tensor>> made;
  };
  auto memory = std::make_shared<Memory>();
  struct Kind {
    at::ScalarType type;
    const gpu::Gpu* gpu;  // null: on the CPU
  };
  std::vector<Kind> kinds;
  for (const Tensor& tensor : inputs.alive) {
    memory->storages.push_back(tensor.storage());
    kinds.push_back({tensor.scalar_type(), tensor.is_cuda() ? &engine.gpu(tensor.get_device()) : nullptr});
    outcome.on_engine_stream = outcome.on_engine_stream || tensor.is_cuda();
  }
  outcome.made = memory->made = std::make_shared<std::vector<Tensor>>(kinds.size());
  submission.keep_alive = memory;
  submission.allocate = [made = outcome.made, kinds = std::move(kinds)](size_t index, const Dims& shape) {
    const auto [type, gpu] = kinds[index];
    Tensor& result = (*made)[index];
    result = gpu == nullptr ? adapter::uninitialized(shape, type) : gpu->allocate(shape, type);
    return adapter::write_view(result);
  };
}

// allgather(engine, tensor or sequence, process_set_id, name, wait)
PyObject* allgather(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("allgather", count, 5);
    PyEnginePtr holder;
    const PyEnginePtr& engine = engine_of(args[0], holder);
    const Tensors tensors(args[1]);
    Submission submission;
    submission.kind = OpKind::kAllgather;
    submission.process_set = process_set_of(args[2]);
    Inputs inputs;
    for (const Tensor* tensor : tensors.all()) {
      Tensor rows = checked(*tensor);
      if (rows.dim() == 0) {
        const at::NoGradGuard no_grad;
        rows = rows.unsqueeze(0);
      }
      inputs.add(rows, submission);
      submission.extents.push_back(rows.size(0));
    }
    submission.name = name_of(args[3], *engine, tensors.kind("allgather"), submission.process_set);
    Outcome outcome;
    outcome.is_list = tensors.grouped();
    let_engine_allocate(*engine, submission, outcome, std::move(inputs));
    return run(engine, std::move(submission), std::move(outcome), args[4] == Py_True);
  });
}

// How many rows go to each member: as given, or the same number to all.
std::vector<int64_t> splits_of(PyObject* argument, int64_t rows, size_t members) {
  const auto size = static_cast<int64_t>(members);
  if (argument == Py_None) {
    if (rows % size != 0) {
      invalid("alltoall without splits needs a first dimension that the " + std::to_string(size) +
              " ranks of the process set divide evenly, got " + std::to_string(rows) + " rows; pass splits=");
    }
    return std::vector<int64_t>(members, rows / size);
  }
  auto splits = py::cast<std::vector<int64_t>>(py::handle(argument));
  if (splits.size() != members) {
    invalid("splits needs one number for each of the " + std::to_string(size) + " ranks of the process set, got " +
            std::to_string(splits.size()));
  }
  int64_t left = rows;
  for (const int64_t part : splits) {
    if (part < 0) invalid("splits must not be negative, got " + to_string(splits));
    if (part > left) {
      invalid("splits " + to_string(splits) + " ask for more rows than the tensor has (" + std::to_string(rows) + ")");
    }
    left -= part;
  }
  return splits;
}

// alltoall(engine, tensor, splits or None, process_set_id, name, wait)
PyObject* alltoall(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("alltoall", count, 6);
    PyEnginePtr holder;
    const PyEnginePtr& engine = engine_of(args[0], holder);
    Submission submission;
    submission.kind = OpKind::kAlltoall;
    submission.process_set = process_set_of(args[3]);
    Tensor rows = with_rows(tensor_of(args[1]), "alltoall");
    const Place place(*engine, submission.process_set);
    submission.extents = splits_of(args[2], rows.size(0), place.size);
    int64_t sent = 0;
    for (const int64_t part : submission.extents) sent += part;
    if (sent < rows.size(0)) {
      const at::NoGradGuard no_grad;
      rows = rows.narrow(0, 0, sent);
    }
    Inputs inputs;
    inputs.add(rows, submission);
    submission.name = name_of(args[4], *engine, "alltoall", submission.process_set);
    Outcome outcome;
    outcome.with_splits = args[2] != Py_None;
    let_engine_allocate(*engine, submission, outcome, std::move(inputs));
    return run(engine, std::move(submission), std::move(outcome), args[5] == Py_True);
  });
}

// reducescatter(engine, tensor or sequence, op, prescale, postscale, process_set_id, name, wire, wait)
PyObject* reducescatter(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    expect_arguments("reducescatter", count, 9);
    PyEnginePtr holder;
    const PyEnginePtr& engine = engine_of(args[0], holder);
    const Tensors tensors(args[1]);
    Submission submission;
    submission.kind = OpKind::kReduceScatter;
    submission.op = operator_of(Py_None, args[2]);
    if (submission.op == ReduceOp::kAdasum) {
      invalid(
          "reducescatter has no meaning with op=Adasum, whose coefficients belong to a whole tensor; allowed: "
          "Average, Sum, Min, Max, Product");
    }
    submission.prescale = number_of(args[3], "prescale_factor");
    submission.postscale = number_of(args[4], "postscale_factor");
    submission.process_set = process_set_of(args[5]);
    const std::optional<DataType> wire = wire_of(args[7]);
    const Place place(*engine, submission.process_set);
    const auto size = static_cast<int64_t>(place.size);
    const auto index = static_cast<int64_t>(place.index.value_or(0));
    Outcome outcome;
    outcome.is_list = tensors.grouped();
    Inputs inputs;
    std::vector<Tensor> alive;
    for (const Tensor* tensor : tensors.all()) {
      const Tensor input = with_rows(*tensor, "reducescatter");
      Dims shape(input.sizes().begin(), input.sizes().end());
      shape[0] = input.size(0) / size + (index < input.size(0) % size ? 1 : 0);
      const Tensor& output =
          outcome.results.emplace_back(adapter::uninitialized(shape, input.scalar_type(), input.device()));
      SubmittedTensor& submitted = inputs.add(input, submission);
      submitted.output = adapter::write_view(output);
      submitted.wire = adapter::wire_type(submitted.input.dtype, wire);
      alive.push_back(output);
    }
    alive.insert(alive.end(), inputs.alive.begin(), inputs.alive.end());
    submission.keep_alive = adapter::keep_alive(alive);
    submission.name = name_of(args[6], *engine, tensors.kind("reducescatter"), submission.process_set);
    return run(engine, std::move(submission), std::move(outcome), args[8] == Py_True);
  });
}

}  // namespace

void register_gather(py::module_& module) {
  static PyMethodDef methods[] = {method("allgather", allgather),
                                  method("alltoall", alltoall),
                                  method("reducescatter", reducescatter),
                                  {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(module.ptr(), methods) != 0) throw py::error_already_set();
}

}  // namespace fusewire::binding
