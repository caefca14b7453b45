// Where Fusewire touches autograd: hooks on AccumulateGrad nodes and the end of a backward pass. What happens there is
// decided by whoever implements BackwardListener. Nothing here needs the GIL.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>

namespace fusewire {

class BackwardListener {
 public:
  virtual ~BackwardListener() = default;

  // The gradient of parameter `slot` is about to be added to its .grad, respectively has been.
  virtual void before_accumulate(size_t slot) = 0;
  virtual void after_accumulate(size_t slot) = 0;

  // A backward has reached parameter `slot`, maybe by a node that has no hooks yet.
  virtual void reach(size_t slot) = 0;

  // The outermost backward has ended: first every listener of it starts what it has to, then every one waits.
  // Listeners come in this order, the same on every rank.
  virtual std::pair<uint32_t, std::string> order() const = 0;
  virtual void end_pass() = 0;
  virtual void settle_pass() = 0;

  // The outermost backward has ended with an exception.
  virtual void abort_pass() noexcept = 0;
};

// The pair of hooks on one parameter's AccumulateGrad node. Keeps the node alive: autograd itself holds it weakly. A
// third hook, on the parameter, moves them when a backward comes by another node (after module.double(), say). Python
// code that registers the first hook on the parameter removes that third one; attach() puts it back.
class AccumulatorHook {
 public:
  using Node = decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>()));

  // Whether the hooks sit on the node that `parameter` uses now. Its accumulator changes with its dtype or device.
  bool follows(const at::Tensor& parameter) const;

  // All three need the same arguments every time. A frozen parameter has no node, so it gets the third hook only.
  // attach() and detach() only while no backward runs.
  void attach(const at::Tensor& parameter, const std::weak_ptr<BackwardListener>& listener, size_t slot);
  void move(const at::Tensor& parameter, const std::weak_ptr<BackwardListener>& listener, size_t slot);
  void detach(const at::Tensor& parameter);

 private:
  void leave();

  Node node_;
  uintptr_t post_key_ = 0;
  torch::autograd::FunctionPreHook* pre_hook_ = nullptr;
  torch::autograd::FunctionPreHook* mover_ = nullptr;
};

// Calls the listener when the backward that is running on this thread has ended. Joining twice is the same as once.
// Returns the id of the graph task, so that a caller can remember that it has joined.
int join_backward(const std::shared_ptr<BackwardListener>& listener);

int current_backward();  // id of the graph task running on this thread

}  // namespace fusewire
