// The end of a window: what GradReducer submits, waits for and does with the results.
#include <ATen/Functions.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "torch/gpu_order.h"
#include "torch/grad_reducer.h"
#include "torch/profile.h"
#include "torch/python_errors.h"
#include "torch/tensor_adapter.h"

namespace fusewire {
namespace {

// Gradients submitted from hooks wake the coordinator thread only when this much has gathered: waking it costs more
// than a small tensor, and the thread that runs backward drives the engine itself at the end.
constexpr int64_t kWakeBytes = 1 << 20;

[[noreturn]] void throw_frozen(const std::string& name) {
  throw Error(ErrorCode::kInternal, "parameter '" + name +
                                        "' is frozen (requires_grad=False) on this rank, but another rank has a "
                                        "gradient for it: freeze and unfreeze it on all ranks alike");
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

Handle GradReducer::launch(Submission submission, bool wake, std::vector<SharedEvent> events) {
  gpu::follow_current(*options_.engine, submission, std::move(events));
  profile(submission);
  return engine().submit(std::move(submission), wake);
}

// `gradient` itself where it can be reduced in place, else a dense one in the parameter's layout.
at::Tensor GradReducer::reducible(const Slot& slot, const at::Tensor& gradient) const {
  const bool strided = gradient.layout() == at::kStrided;
  if (strided && !gradient.is_conj() && !gradient.is_neg() && !adapter::overlaps_itself(gradient)) return gradient;
  if (slot.ready) gpu_of(gradient).hold_up_current(*slot.ready);
  at::NoGradGuard no_grad;
  at::Tensor dense = adapter::resolved(strided ? gradient : gradient.to_dense());
  if (adapter::overlaps_itself(dense)) {
    const at::Tensor copy = at::empty_like(slot.parameter, gradient.options().layout(at::kStrided));
    copy.copy_(dense);
    dense = copy;
  }
  return dense;
}

void GradReducer::submit(Unit& unit) {
  Submission result = submission(unit.name);
  result.tensors.reserve(unit.slots.size());
  std::vector<at::Tensor> alive;
  alive.reserve(unit.slots.size());
  std::vector<SharedEvent> events;
  for (const size_t index : unit.slots) result.tensors.push_back(describe(slots_[index], alive, events));
  for (const at::Tensor& tensor : alive) unannounced_ += static_cast<int64_t>(tensor.nbytes());
  result.keep_alive = adapter::keep_alive(alive);
  const bool wake = pass_open_ && unannounced_ >= kWakeBytes;
  if (wake) unannounced_ = 0;
  unit.handle = launch(std::move(result), wake, std::move(events));
}

SubmittedTensor GradReducer::describe(Slot& slot, std::vector<at::Tensor>& alive, std::vector<SharedEvent>& events) {
  SubmittedTensor result;
  at::Tensor& gradient = slot.parameter.mutable_grad();
  if (discard_ || !slot.owned) {
    result.input = result.output = shape_of(slot.parameter);
    result.absent = true;
  } else if (gradient.defined() && !is_apart(slot)) {
    const at::Tensor dense = reducible(slot, gradient);
    const bool copied = !dense.is_same(gradient);
    if (copied) gradient = dense;
    slot.output.reset();
    adapter::bump_version(dense);
    result.input = adapter::write_view(dense);
    if (slot.ready && !copied) {
      result.input.ready_event = slot.ready->get();
      events.push_back(slot.ready);
    }
    result.output = result.input;
    result.absent = !slot.present;
    alive.push_back(dense);
  } else {
    slot.apart = slot.present && gradient.defined();
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

bool GradReducer::is_apart(const Slot& slot) const {
  const at::Tensor& gradient = slot.parameter.grad();
  return options_.compressed || (gradient.defined() && gradient.layout() != at::kStrided && !options_.sparse_as_dense);
}

void GradReducer::submit_window() {
  try {
    for (Slot& slot : slots_) slot.ready = nullptr;  // what is current now knows: see Note [Gradients on a GPU]
    for (Unit& unit : units_) {
      const bool ours =
          std::any_of(unit.slots.begin(), unit.slots.end(), [this](size_t index) { return slots_[index].owned; });
      if (ours && !unit.handle && !options_.compressed) submit(unit);
    }
    if (options_.compressed) {
      for (Slot& slot : slots_) slot.apart = slot.owned && slot.present && !discard_;
    }
    submit_flags();
    submitted_ = true;
  } catch (...) {
    reset_window();
    throw;
  }
}

void GradReducer::submit_flags() {
  const auto count = static_cast<int64_t>(slots_.size());
  flags_ = at::zeros({3 * count + 1}, at::kInt);
  auto* flags = static_cast<int32_t*>(flags_.mutable_data_ptr());
  Submission result = submission(options_.prefix + "/flags");
  result.op = ReduceOp::kMax;
  result.prescale = result.postscale = 1.0;
  SubmittedTensor& tensor = result.tensors.emplace_back();
  tensor.input = tensor.output = adapter::write_view(flags_);
  tensor.wire = tensor.input.dtype;
  for (int64_t i = 0; i < count && !discard_; ++i) {
    const Slot& slot = slots_[static_cast<size_t>(i)];
    flags[i] = slot.set_aside.defined();
    if (!slot.apart) continue;
    const at::Tensor& gradient = slot.parameter.grad();
    const bool sparse = gradient.defined() && gradient.layout() != at::kStrided && !options_.sparse_as_dense;
    flags[(sparse ? 2 : 1) * count + i] = 1;
  }
  if (discard_) flags[3 * count] = 1 + engine().rank();
  tensor.absent = std::all_of(flags, flags + 3 * count + 1, [](int32_t flag) { return flag == 0; });
  result.keep_alive = adapter::keep_alive(flags_);
  flags_handle_ = launch(std::move(result), false);
}

bool GradReducer::flagged(Flag flag, size_t slot) const {
  return static_cast<const int32_t*>(flags_.const_data_ptr())[static_cast<size_t>(flag) * slots_.size() + slot] != 0;
}

// What the window's flags ask for, if there are any.
void GradReducer::obey_flags() {
  const int32_t aborted = static_cast<const int32_t*>(flags_.const_data_ptr())[3 * slots_.size()];
  if (aborted != 0) {
    if (discard_) return;
    drop_gradients();
    throw Error(ErrorCode::kInternal,
                "the backward() of rank " + std::to_string(aborted - 1) +
                    " has ended with an exception (its own output says which), so this step has no gradients: they are "
                    "None now on every rank. To go on, catch the exception of backward() on all ranks alike.",
                aborted - 1);
  }
  reduce_again();
  exchange();
}

void GradReducer::wait_window() {
  std::vector<Handle> handles;
  for (const Unit& unit : units_) {
    if (unit.handle) handles.push_back(unit.handle);
  }
  handles.push_back(flags_handle_);
  try {
    std::exception_ptr failed;
    try {
      engine().wait_all(handles, binding::check_signals);
    } catch (const Error&) {
      failed = std::current_exception();  // one tensor's error does not take the others' results away
    }
    gpu::hold_up_current(*options_.engine, handles);
    for (const Unit& unit : units_) {
      if (!unit.handle || !unit.handle->done() || !unit.handle->ok()) continue;
      const std::vector<bool>& skipped = unit.handle->skipped();
      for (size_t i = 0; i < unit.slots.size(); ++i) settle(slots_[unit.slots[i]], !skipped.empty() && skipped[i]);
      unit.handle->drop_keep_alive();
    }
    if (failed) std::rethrow_exception(failed);
    if (flags_handle_->skipped().empty()) obey_flags();
  } catch (...) {
    reset_window();
    throw;
  }
  reset_window();
  final_ = true;
  if (!options_.engine->has_gpu()) return;
  const std::string left = leftovers_.collect(options_.engine->gpu());  // see Note [Leftovers]
  if (!left.empty()) refuse_leftovers(left);
}

void GradReducer::settle(Slot& slot, bool skipped) {
  if (discard_ || !slot.owned) return;
  at::Tensor& gradient = slot.parameter.mutable_grad();
  if (slot.set_aside.defined()) std::swap(gradient, slot.set_aside);
  if (skipped) return;
  slot.reduced = slot.settled = true;
  if (gradient.defined() && gradient.layout() == at::kStrided) return;  // it is there
  if (!slot.output.defined()) throw_frozen(slot.name);
  (slot.apart ? slot.dense : gradient) = std::move(slot.output);
}

// Second contributions: see Note [Passes and windows].
void GradReducer::reduce_again() {
  at::NoGradGuard no_grad;
  std::vector<Handle> handles;
  std::vector<std::pair<Slot*, at::Tensor>> seconds;
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (!flagged(Flag::kAgain, i)) continue;
    const bool mine = slot.set_aside.defined();
    const at::Tensor second =
        mine ? reducible(slot, slot.set_aside) : adapter::uninitialized_like(slot.parameter.detach());
    Submission result = submission(options_.prefix + "/again/" + slot.name);
    SubmittedTensor& tensor = result.tensors.emplace_back();
    tensor.input = tensor.output = adapter::write_view(second);
    if (!mine) tensor.input.data = nullptr;
    tensor.absent = !mine;
    tensor.wire = adapter::wire_type(tensor.input.dtype, options_.wire);
    result.keep_alive = adapter::keep_alive(second);
    handles.push_back(launch(std::move(result), false));
    seconds.emplace_back(&slot, second);
  }
  engine().wait_all(handles, binding::check_signals);
  gpu::hold_up_current(*options_.engine, handles);
  for (const auto& [slot, second] : seconds) {
    at::Tensor& gradient = slot->parameter.mutable_grad();
    if (!discard_ && slot->owned && gradient.defined()) gradient.add_(second);
  }
}

// See Note [Apart].
void GradReducer::exchange() {
  at::NoGradGuard no_grad;
  std::vector<Exchange::Item> items;
  std::vector<Slot*> slots;
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    const bool dense = flagged(Flag::kApart, i);
    if (!dense && !flagged(Flag::kSparse, i)) continue;
    Exchange::Item& item = items.emplace_back();
    item.name = slot.name;
    item.parameter = slot.parameter.detach();
    item.sparse = !dense;
    const at::Tensor& gradient = slot.parameter.grad();
    if (slot.owned && gradient.defined()) {
      const bool sparse = gradient.layout() != at::kStrided;
      if (dense) {
        item.value = reducible(slot, gradient);
      } else if (sparse) {
        item.value = gradient;
      }
    }
    slots.push_back(&slot);
  }
  if (items.empty()) return;
  const std::vector<at::Tensor> results = options_.exchange->run(options_.prefix, items);
  for (size_t i = 0; i < items.size(); ++i) {
    Slot& slot = *slots[i];
    if (!slot.owned) continue;
    if (!slot.parameter.requires_grad()) throw_frozen(slot.name);
    slot.reduced = true;
    at::Tensor& gradient = slot.parameter.mutable_grad();
    if (items[i].sparse) {
      // What the unit has summed, if anything: here in .grad, or beside it where that was sparse.
      const at::Tensor sum = slot.dense.defined() ? slot.dense : slot.settled ? gradient : at::Tensor();
      gradient = sum.defined() ? sum.add(results[i]) : results[i];
    } else if (items[i].value.defined() && items[i].value.is_same(gradient)) {
      gradient.copy_(results[i]);
    } else {
      gradient = at::empty_like(slot.parameter).copy_(results[i]);
    }
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
    slot.ready = nullptr;
    slot.apart = slot.settled = false;
    slot.set_aside.reset();
    slot.dense.reset();
  }
  flags_handle_ = nullptr;
  flags_.reset();
  passes_done_ = 0;
  unannounced_ = 0;
  submitted_ = false;
}

}  // namespace fusewire
