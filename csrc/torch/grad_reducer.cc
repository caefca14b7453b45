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

// autograd carries python_error from its threads to backward() as it is.
template <class Body>
void typed(Body&& body) {
  try {
    body();
  } catch (const Error&) {
    binding::throw_through_autograd(std::current_exception());
  } catch (const py::error_already_set&) {
    binding::throw_through_autograd(std::current_exception());
  }
}

bool is_zero(const at::Tensor& gradient) {
  at::NoGradGuard no_grad;
  if (gradient.layout() == at::kStrided && gradient.is_non_overlapping_and_dense()) {
    const auto* bytes = static_cast<const char*>(gradient.const_data_ptr());
    const size_t size = gradient.nbytes();
    return size == 0 || (bytes[0] == 0 && std::memcmp(bytes, bytes + 1, size - 1) == 0);
  }
  return !gradient.to_dense().any().item<bool>();
}

}  // namespace

GradReducer::~GradReducer() {
  for (const Slot& slot : slots_) Owners::drop(slot.parameter, this);
}

void GradReducer::add(const std::vector<std::string>& names, const std::vector<at::Tensor>& parameters, bool missed) {
  for (const at::Tensor& parameter : parameters) {
    adapter::check_dense(parameter);
    if (parameter.is_cuda()) gpu_of(parameter);
  }
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
      slot.hook.attach(slot.parameter, weak_from_this(), slots_.size() - 1);
      slot.present = missed && slot.parameter.grad().defined();
    }
    if (missed) final_ = false;
  }
  for (size_t i = 0; i < parameters.size(); ++i) Owners::take(parameters[i], shared_from_this(), first + i);
}

void GradReducer::release(size_t slot) {
  const std::lock_guard lock(mutex_);
  slots_[slot].owned = false;
  if (!pass_open_) slots_[slot].hook.detach(slots_[slot].parameter);  // else the hook stays, and does nothing
  units_[slots_[slot].unit].early = false;
}

void GradReducer::close() {
  const std::lock_guard lock(mutex_);
  for (Slot& slot : slots_) {
    slot.owned = false;
    if (!pass_open_) slot.hook.detach(slot.parameter);
    Owners::drop(slot.parameter, this);
  }
  for (Unit& unit : units_) unit.early = false;
}

void GradReducer::rebind(binding::PyEnginePtr engine, std::string prefix, uint32_t process_set) {
  const std::lock_guard lock(mutex_);
  reset_window();
  options_.engine = std::move(engine);
  options_.prefix = std::move(prefix);
  options_.process_set = process_set;
  for (Unit& unit : units_) unit.name = options_.prefix + "." + slots_[unit.slots.front()].name;
  joined_ = -1;
  pass_open_ = final_ = aborted_ = discard_ = false;
}

std::pair<uint32_t, std::string> GradReducer::order() const {
  const std::lock_guard lock(mutex_);
  return {options_.process_set, options_.prefix};
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

void GradReducer::reach(size_t index) {
  const std::lock_guard lock(mutex_);
  Slot& slot = slots_[index];
  if (slot.owned && !slot.hook.follows(slot.parameter)) slot.hook.move(slot.parameter, weak_from_this(), index);
}

void GradReducer::refuse_leftovers(const std::string& name) {
  throw Error(ErrorCode::kInternal,
              "the gradient of parameter '" + name +
                  "' is reduced already, and another backward() would add local values to it, which can only be "
                  "reduced again with op=Average and backward_passes_per_step=1. 1) Call zero_grad() after each step. "
                  "2) To accumulate several backward passes, set backward_passes_per_step to their number.");
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
    if (options_.op == ReduceOp::kAverage && options_.passes == 1) return;  // what is reduced again stays as it is
    if (gradient.defined() && gradient.is_cuda()) {
      leftovers_.look(slot.name, gradient);
    } else if (gradient.defined() && !is_zero(gradient)) {
      refuse_leftovers(slot.name);
    }
    slot.reduced = false;
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
    if (slot.parameter.grad().layout() != at::kStrided) {
      slot.late = true;
      unit.early = false;
    }
    if (!unit.early || unit.handle || passes_done_ + 1 < options_.passes) return;
    const at::Tensor& gradient = slot.parameter.grad();
    if (gradient.is_cuda()) slot.ready = gpu_of(gradient).mark_current();
    if (slot.fires > 1) return;
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
    unit.early = !options_.compressed && std::all_of(unit.slots.begin(), unit.slots.end(), [this](size_t index) {
      const Slot& slot = slots_[index];
      return slot.owned && slot.once && !slot.late;
    });
  }
}

void GradReducer::follow_accumulators() {
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (!slot.owned) continue;
    const bool followed = !slot.parameter.requires_grad() || slot.hook.follows(slot.parameter);
    slot.hook.attach(slot.parameter, weak_from_this(), i);
    if (followed) continue;
    if (slot.parameter.grad().defined()) slot.present = true;  // it may have fired where we did not see it
  }
}

void GradReducer::synchronize() {
  const std::lock_guard lock(mutex_);
  settle_aborted();
  if (final_ || std::none_of(slots_.begin(), slots_.end(), [](const Slot& slot) { return slot.owned; })) return;
  follow_accumulators();
  submit_window();
  wait_window();
}

// Note [Aborted passes]
// When a backward ends with an exception in the last pass of a window, some of the window's gradients may be in flight.
// All of the window's gradients are taken off their parameters at once, and the rest of the window is submitted: this
// rank is absent for everything that has not left, wants no result, and says so in the window's flags. Ranks whose own
// backward has not failed raise then as well and drop the window's gradients, too. So all ranks are in step, whatever
// the program does next; results are waited for at the next opportunity. In an earlier pass of a window nothing has
// left: it is as if the pass had not been.
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
  }
  if (passes_done_ + 1 < options_.passes) return;
  aborted_ = true;
  drop_gradients();
  discard_ = true;
  try {
    submit_window();
  } catch (...) {  // the engine has failed; who needs it next says so
  }
  discard_ = false;
}

void GradReducer::drop_gradients() {
  for (Slot& slot : slots_) {
    if (slot.owned && slot.present) slot.parameter.mutable_grad().reset();
  }
}

void GradReducer::settle_aborted() {
  if (!aborted_) return;
  aborted_ = false;
  discard_ = true;
  try {
    if (!submitted_) submit_window();
    wait_window();
  } catch (...) {
    discard_ = false;
    throw;
  }
  discard_ = false;
  final_ = false;
}

}  // namespace fusewire
