#include "torch/grad_reducer.h"

#include <ATen/Functions.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "torch/owners.h"
#include "torch/python_errors.h"
#include "torch/tensor_adapter.h"

namespace fusewire {
namespace {

// Gradients submitted from hooks wake the coordinator thread only when this much has gathered: waking it costs more
// than a small tensor, and the thread that runs backward drives the engine itself at the end.
constexpr int64_t kWakeBytes = 1 << 20;

// autograd carries python_error from its threads to backward() as it is.
template <class Body>
void typed(Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    binding::throw_through_autograd(error);
  }
}

bool is_zero(const at::Tensor& gradient) {
  at::NoGradGuard no_grad;
  if (gradient.layout() == at::kStrided && gradient.device().is_cpu() && gradient.is_non_overlapping_and_dense()) {
    const auto* bytes = static_cast<const char*>(gradient.const_data_ptr());
    const size_t size = gradient.nbytes();
    return size == 0 || (bytes[0] == 0 && std::memcmp(bytes, bytes + 1, size - 1) == 0);
  }
  return !gradient.to_dense().any().item<bool>();
}

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

GradReducer::~GradReducer() {
  for (const Slot& slot : slots_) Owners::drop(slot.parameter, this);
}

void GradReducer::add(const std::vector<std::string>& names, const std::vector<at::Tensor>& parameters, bool missed) {
  for (const at::Tensor& parameter : parameters) adapter::check_dense(parameter);
  size_t first = 0;
  {
    const std::lock_guard lock(mutex_);
    first = slots_.size();
    Unit& unit = units_.emplace_back();
    unit.name = options_.prefix + "." + names.front();
    for (size_t i = 0; i < names.size(); ++i) {
      Slot& slot = slots_.emplace_back();
      slot.name = names[i];
      slot.parameter = parameters[i];
      slot.unit = units_.size() - 1;
      unit.slots.push_back(slots_.size() - 1);
      if (slot.parameter.requires_grad()) slot.hook.attach(slot.parameter, weak_from_this(), slots_.size() - 1);
      slot.present = missed && slot.parameter.grad().defined();
    }
  }
  for (size_t i = 0; i < parameters.size(); ++i) Owners::take(parameters[i], shared_from_this(), first + i);
}

void GradReducer::release(size_t slot) {
  const std::lock_guard lock(mutex_);
  slots_[slot].owned = false;
  if (!pass_open_) slots_[slot].hook.detach();  // else the hook stays, and does nothing
  units_[slots_[slot].unit].early = false;
}

void GradReducer::close() {
  const std::lock_guard lock(mutex_);
  for (Slot& slot : slots_) {
    slot.owned = false;
    if (!pass_open_) slot.hook.detach();
    Owners::drop(slot.parameter, this);
  }
  for (Unit& unit : units_) unit.early = false;
}

void GradReducer::set_passes(int passes) {
  const std::lock_guard lock(mutex_);
  options_.passes = passes;
}

bool GradReducer::owns_any() const {
  const std::lock_guard lock(mutex_);
  return std::any_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.owned; });
}

void GradReducer::expire() {
  const std::lock_guard lock(mutex_);
  final_ = false;
}

void GradReducer::before_accumulate(size_t index) {
  typed([&] {
    const std::lock_guard lock(mutex_);
    settle_aborted();
    Slot& slot = slots_[index];
    if (!slot.owned) return;
    at::Tensor& gradient = slot.parameter.mutable_grad();
    if (units_[slot.unit].handle) {  // in flight: see Note [Passes and windows]
      if (!slot.set_aside.defined()) slot.set_aside = std::exchange(gradient, at::Tensor());
      slot.late = true;
      return;
    }
    if (slot.present || !slot.reduced) return;
    if (!gradient.defined() || is_zero(gradient)) {
      slot.reduced = false;
    } else if (options_.op != ReduceOp::kAverage || options_.passes > 1) {
      throw Error(ErrorCode::kInternal,
                  "the gradient of parameter '" + slot.name +
                      "' is reduced already, and another backward() would add local values to it, which can only be "
                      "reduced again with op=Average and backward_passes_per_step=1. 1) Call zero_grad() after each "
                      "step. 2) To accumulate several backward passes, set backward_passes_per_step to their number.");
    }
  });
}

void GradReducer::after_accumulate(size_t index) {
  typed([&] {
    const std::lock_guard lock(mutex_);
    Slot& slot = slots_[index];
    if (!slot.owned) return;
    open_pass();
    slot.present = true;
    ++slot.fires;
    Unit& unit = units_[slot.unit];
    if (slot.fires > 1 || !unit.early || unit.handle || passes_done_ + 1 < options_.passes) return;
    if (++unit.arrived == unit.slots.size()) submit(unit);
  });
}

void GradReducer::open_pass() {
  if (joined_ != current_backward()) joined_ = join_backward(shared_from_this());
  pass_open_ = true;
  final_ = false;
}

void GradReducer::end_pass() {
  typed([&] {
    const std::lock_guard lock(mutex_);
    if (!pass_open_) return;
    pass_open_ = false;
    joined_ = -1;
    ++passes_done_;
    follow_accumulators();
    learn();
    if (passes_done_ >= options_.passes) submit_window();
  });
}

void GradReducer::settle_pass() {
  typed([&] {
    const std::lock_guard lock(mutex_);
    if (submitted_) wait_window();
  });
}

void GradReducer::learn() {
  for (Slot& slot : slots_) {
    if (slot.fires > 1) slot.late = true;
    if (slot.fires == 1) slot.once = true;
    slot.fires = 0;
  }
  for (Unit& unit : units_) {
    unit.arrived = 0;
    unit.early = !options_.compressor && std::all_of(unit.slots.begin(), unit.slots.end(), [this](size_t index) {
      const Slot& slot = slots_[index];
      return slot.owned && slot.once && !slot.late;
    });
  }
}

void GradReducer::follow_accumulators() {
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (!slot.owned || !slot.parameter.requires_grad() || slot.hook.follows(slot.parameter)) continue;
    slot.hook.attach(slot.parameter, weak_from_this(), i);
    if (slot.parameter.grad().defined()) slot.present = true;  // it may have fired where we did not see it
  }
}

void GradReducer::synchronize() {
  const std::lock_guard lock(mutex_);
  settle_aborted();
  if (final_) return;
  follow_accumulators();
  submit_window();
  wait_window();
}

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

// Note [Aborted passes]
// When a backward ends with an exception, some of the window's gradients may be in flight. They are detached from their
// parameters at once. If the program goes on all the same, the rest of the window is settled at the next opportunity:
// this rank is absent for everything that has not left, and wants no result. Ranks that all abort the same pass, or
// that skip it all together, stay in step that way.
void GradReducer::abort_pass() noexcept {
  std::optional<py::gil_scoped_release> no_gil;
  if (PyGILState_Check()) no_gil.emplace();
  const std::lock_guard lock(mutex_);
  if (!pass_open_) return;
  pass_open_ = false;
  joined_ = -1;
  for (Slot& slot : slots_) {
    slot.fires = 0;
    slot.set_aside.reset();
    if (slot.owned && units_[slot.unit].handle) slot.parameter.mutable_grad().reset();
  }
  aborted_ = passes_done_ + 1 >= options_.passes;  // else nothing has left: as if the pass had not been
}

void GradReducer::settle_aborted() {
  if (!aborted_) return;
  aborted_ = false;
  discard_ = true;
  try {
    submit_window();
    wait_window();
  } catch (...) {
    discard_ = false;
    throw;
  }
  discard_ = false;
  final_ = false;
}

}  // namespace fusewire
