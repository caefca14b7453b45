// The end of a window: what GradReducer submits, waits for and does with the results.
#include <ATen/Functions.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "torch/grad_reducer.h"
#include "torch/python_errors.h"
#include "torch/tensor_adapter.h"

namespace fusewire {
namespace {

// Gradients submitted from hooks wake the coordinator thread only when this much has gathered: waking it costs more
// than a small tensor, and the thread that runs backward drives the engine itself at the end.
constexpr int64_t kWakeBytes = 1 << 20;

// `gradient` itself where it can be reduced in place, else a dense one in the parameter's layout.
at::Tensor reducible(const at::Tensor& parameter, const std::string& name, const at::Tensor& gradient, bool densify) {
  at::NoGradGuard no_grad;
  at::Tensor dense = gradient;
  if (gradient.layout() != at::kStrided) {
    TORCH_CHECK_NOT_IMPLEMENTED(
        densify, "parameter '", name,
        "' has a sparse gradient; pass sparse_as_dense=True to DistributedOptimizer, or make the "
        "layer with sparse=False");
    dense = gradient.to_dense();
  }
  dense = adapter::resolved(dense);
  if (adapter::overlaps_itself(dense)) {
    const at::Tensor copy = at::empty_like(parameter, gradient.options().layout(at::kStrided));
    copy.copy_(dense);
    dense = copy;
  }
  return dense;
}

TensorView shape_of(const at::Tensor& tensor) {
  TensorView view = adapter::read_view(tensor);
  view.data = nullptr;
  return view;
}

}  // namespace

Submission GradReducer::submission(std::string name) const {
  Submission result;
  result.kind = OpKind::kAllreduce;
  result.op = options_.op;
  result.prescale = options_.prescale;
  result.postscale = options_.postscale;
  result.process_set = options_.process_set;
  result.name = std::move(name);
  return result;
}

void GradReducer::submit(Unit& unit) {
  Submission result = submission(unit.name);
  result.tensors.reserve(unit.slots.size());
  std::vector<at::Tensor> alive;
  alive.reserve(unit.slots.size());
  for (const size_t index : unit.slots) result.tensors.push_back(describe(slots_[index], alive));
  for (const at::Tensor& tensor : alive) unannounced_ += static_cast<int64_t>(tensor.nbytes());
  result.keep_alive = adapter::keep_alive(alive);
  const bool wake = pass_open_ && unannounced_ >= kWakeBytes;
  if (wake) unannounced_ = 0;
  unit.handle = engine().submit(std::move(result), wake);
}

SubmittedTensor GradReducer::describe(Slot& slot, std::vector<at::Tensor>& alive) {
  SubmittedTensor result;
  at::Tensor& gradient = slot.parameter.mutable_grad();
  if (discard_ || !slot.owned) {
    result.input = result.output = shape_of(slot.parameter);
    result.absent = true;
  } else if (options_.compressor) {
    return describe_compressed(slot, alive);
  } else if (gradient.defined()) {
    const at::Tensor dense = reducible(slot.parameter, slot.name, gradient, options_.sparse_as_dense);
    if (!dense.is_same(gradient)) gradient = dense;
    slot.output.reset();
    adapter::bump_version(dense);
    result.input = result.output = adapter::write_view(dense);
    result.absent = !slot.present;
    alive.push_back(dense);
  } else {
    result.input = shape_of(slot.parameter);
    result.output = result.input;
    result.absent = true;
    if (slot.parameter.requires_grad()) {  // a frozen one does not want the result; settle() sees if there is one
      if (!slot.output.defined() || !slot.output.options().type_equal(slot.parameter.options())) {
        slot.output = adapter::uninitialized_like(slot.parameter.detach());
      }
      result.output = adapter::write_view(slot.output);
      alive.push_back(slot.output);
    }
  }
  result.wire = adapter::wire_type(result.input.dtype, options_.wire);
  return result;
}

SubmittedTensor GradReducer::describe_compressed(Slot& slot, std::vector<at::Tensor>& alive) {
  at::NoGradGuard no_grad;
  at::Tensor& gradient = slot.parameter.mutable_grad();
  at::Tensor value = at::zeros_like(slot.parameter);
  if (gradient.defined()) value = gradient = reducible(slot.parameter, slot.name, gradient, options_.sparse_as_dense);
  slot.compressed = options_.compressor->compress(value);
  slot.compressed.tensor = adapter::resolved(slot.compressed.tensor);
  adapter::check_dense(slot.compressed.tensor);
  slot.output = adapter::uninitialized_like(slot.compressed.tensor);
  alive.push_back(slot.compressed.tensor);
  alive.push_back(slot.output);
  SubmittedTensor result;
  result.input = adapter::read_view(slot.compressed.tensor);
  result.output = adapter::write_view(slot.output);
  result.wire = result.input.dtype;
  result.absent = !slot.present;
  return result;
}

void GradReducer::submit_window() {
  try {
    for (Unit& unit : units_) {
      const bool ours =
          std::any_of(unit.slots.begin(), unit.slots.end(), [this](size_t index) { return slots_[index].owned; });
      if (ours && !unit.handle) submit(unit);
    }
    again_flags_ = at::zeros({static_cast<int64_t>(slots_.size())}, at::kByte);
    auto* flags = static_cast<uint8_t*>(again_flags_.mutable_data_ptr());
    Submission result = submission(options_.prefix + "/again");
    result.op = ReduceOp::kMax;
    result.prescale = result.postscale = 1.0;
    SubmittedTensor& tensor = result.tensors.emplace_back();
    tensor.input = tensor.output = adapter::write_view(again_flags_);
    tensor.wire = tensor.input.dtype;
    tensor.absent = true;
    for (size_t i = 0; i < slots_.size(); ++i) {
      flags[i] = slots_[i].set_aside.defined() && !discard_;
      tensor.absent = tensor.absent && flags[i] == 0;
    }
    result.keep_alive = adapter::keep_alive(again_flags_);
    again_ = engine().submit(std::move(result), false);
    submitted_ = true;
  } catch (...) {
    reset_window();
    throw;
  }
}

void GradReducer::wait_window() {
  std::vector<Handle> handles;
  for (const Unit& unit : units_) {
    if (unit.handle) handles.push_back(unit.handle);
  }
  handles.push_back(again_);
  try {
    std::exception_ptr failed;
    try {
      engine().wait_all(handles, binding::check_signals);
    } catch (const Error&) {
      failed = std::current_exception();  // one tensor's error does not take the others' results away
    }
    for (const Unit& unit : units_) {
      if (!unit.handle || !unit.handle->done() || !unit.handle->ok()) continue;
      const std::vector<bool>& skipped = unit.handle->skipped();
      for (size_t i = 0; i < unit.slots.size(); ++i) settle(slots_[unit.slots[i]], !skipped.empty() && skipped[i]);
      unit.handle->drop_keep_alive();
    }
    if (failed) std::rethrow_exception(failed);
    if (again_->skipped().empty()) reduce_again();
  } catch (...) {
    reset_window();
    throw;
  }
  reset_window();
  final_ = true;
}

void GradReducer::settle(Slot& slot, bool skipped) {
  if (discard_ || !slot.owned) return;
  at::Tensor& gradient = slot.parameter.mutable_grad();
  if (slot.set_aside.defined()) std::swap(gradient, slot.set_aside);
  if (skipped) return;
  slot.reduced = true;
  if (slot.compressed.tensor.defined()) {
    at::NoGradGuard no_grad;
    const at::Tensor value = options_.compressor->decompress(slot.output, slot.compressed.context);
    if (!gradient.defined()) gradient = at::empty_like(slot.parameter);
    gradient.copy_(value);
    slot.output.reset();
  } else if (!gradient.defined()) {
    if (!slot.output.defined()) {
      throw Error(ErrorCode::kInternal, "parameter '" + slot.name +
                                            "' is frozen (requires_grad=False) on this rank, but another rank has a "
                                            "gradient for it: freeze and unfreeze it on all ranks alike");
    }
    gradient = std::move(slot.output);
  }
}

// Second contributions: see Note [Passes and windows].
void GradReducer::reduce_again() {
  at::NoGradGuard no_grad;
  std::vector<Handle> handles;
  std::vector<std::pair<Slot*, at::Tensor>> seconds;
  const auto* flags = static_cast<const uint8_t*>(again_flags_.const_data_ptr());
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (flags[i] == 0) continue;
    const bool mine = slot.set_aside.defined();
    const at::Tensor second = mine ? reducible(slot.parameter, slot.name, slot.set_aside, options_.sparse_as_dense)
                                   : adapter::uninitialized_like(slot.parameter.detach());
    Submission result = submission(options_.prefix + "/again/" + slot.name);
    SubmittedTensor& tensor = result.tensors.emplace_back();
    tensor.input = tensor.output = adapter::write_view(second);
    if (!mine) tensor.input.data = nullptr;
    tensor.absent = !mine;
    tensor.wire = adapter::wire_type(tensor.input.dtype, options_.wire);
    result.keep_alive = adapter::keep_alive(second);
    handles.push_back(engine().submit(std::move(result), false));
    seconds.emplace_back(&slot, second);
  }
  engine().wait_all(handles, binding::check_signals);
  for (const auto& [slot, second] : seconds) {
    at::Tensor& gradient = slot->parameter.mutable_grad();
    if (!discard_ && slot->owned && gradient.defined()) gradient.add_(second);
  }
}

void GradReducer::reset_window() {
  for (Unit& unit : units_) {
    unit.handle = nullptr;
    unit.arrived = 0;
  }
  for (Slot& slot : slots_) {
    slot.present = false;
    slot.fires = 0;
    slot.set_aside.reset();
    slot.compressed = {};
  }
  again_ = nullptr;
  again_flags_.reset();
  passes_done_ = 0;
  unannounced_ = 0;
  submitted_ = false;
}

}  // namespace fusewire
