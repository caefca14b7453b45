// Where Fusewire touches autograd: hooks on AccumulateGrad nodes and the end of a backward pass. What happens there is
// decided by whoever implements BackwardListener. Nothing here needs the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <memory>

namespace fusewire {

class BackwardListener {
 public:
  virtual ~BackwardListener() = default;

  // The gradient of parameter `slot` is about to be added to its .grad, respectively has been.
  virtual void before_accumulate(size_t slot) = 0;
  virtual void after_accumulate(size_t slot) = 0;

  // The outermost backward has ended: first every listener of it starts what it has to, then every one waits.
  virtual void end_pass() = 0;
  virtual void settle_pass() = 0;

  // The outermost backward has ended with an exception.
  virtual void abort_pass() noexcept = 0;
};

// The pair of hooks on one parameter's AccumulateGrad node. Keeps the node alive: autograd itself holds it weakly.
class AccumulatorHook {
 public:
  using Node = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

  // Whether the hooks sit on the node that `parameter` uses now. Its accumulator changes with its dtype or device.
  bool follows(const at::Tensor& parameter) const;

  void attach(const at::Tensor& parameter, std::weak_ptr<BackwardListener> listener, size_t slot);
  void detach();  // only while no backward runs
  bool attached() const { return static_cast<bool>(node_); }

 private:
  Node node_;
  uintptr_t post_key_ = 0;
  torch::autograd::FunctionPreHook* pre_hook_ = nullptr;
};

// Calls the listener when the backward that is running on this thread has ended. Joining twice is the same as once.
// Returns the id of the graph task, so that a caller can remember that it has joined.
int join_backward(const std::shared_ptr<BackwardListener>& listener);

int current_backward();  // id of the graph task running on this thread

}  // namespace fusewire
