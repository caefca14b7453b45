#include "torch/grad_hooks.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <exception>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace fusewire {
namespace {

using torch::autograd::variable_list;

[[noreturn]] void refuse_compiled_autograd() {
  TORCH_CHECK_NOT_IMPLEMENTED(false,
                              "Fusewire's gradient hooks do not work under compiled autograd yet: switch it off with "
                              "torch._dynamo.config.compiled_autograd = False (torch.compile itself is fine)");
}

struct PreHook final : torch::autograd::FunctionPreHook {
  PreHook(std::weak_ptr<BackwardListener> to, size_t at) : listener(std::move(to)), slot(at) {}
  variable_list operator()(const variable_list& gradients) override {
    if (const auto target = listener.lock()) target->before_accumulate(slot);
    return gradients;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuse_compiled_autograd(); }

  std::weak_ptr<BackwardListener> listener;
  size_t slot;
};

struct PostHook final : torch::autograd::FunctionPostHook {
  PostHook(std::weak_ptr<BackwardListener> to, size_t at) : listener(std::move(to)), slot(at) {}
  variable_list operator()(const variable_list& outputs, const variable_list&) override {
    if (const auto target = listener.lock()) target->after_accumulate(slot);
    return outputs;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuse_compiled_autograd(); }

  std::weak_ptr<BackwardListener> listener;
  size_t slot;
};

struct Mover final : torch::autograd::FunctionPreHook {
  Mover(std::weak_ptr<BackwardListener> to, size_t at) : listener(std::move(to)), slot(at) {}
  variable_list operator()(const variable_list& gradients) override {
    if (const auto target = listener.lock()) target->reach(slot);
    return gradients;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuse_compiled_autograd(); }

  std::weak_ptr<BackwardListener> listener;
  size_t slot;
};

// Note [The end of a backward]
// autograd calls back when a graph task ends, but a re-entrant backward (checkpointing) is a graph task of its own
// inside a node of the outer one. So: the first hook of a task queues one callback on it. When the callback finds a
// node being evaluated on its thread, its task was an inner one, and everybody who had joined it has to join the outer
// task. autograd does not let anybody reach that task from here, nor does it look at hooks that a node gets while it is
// being evaluated. But the nodes that follow it in the outer graph are evaluated later, in the outer task: a hook on
// one of them joins. When the callback finds no node, the pass has ended.
//
// Several listeners (optimizers) may share a pass, and ranks may meet them in different order. If each one waited for
// its own tensors before the next one submitted any, two ranks could wait for each other for ever: hence two rounds,
// all submit, then all wait.
//
// A backward that throws never calls back; it destroys the callback. That is how an aborted pass is noticed.
class Watch;

struct Watches {
  std::mutex mutex;  // a leaf: nothing is called while it is held
  std::unordered_map<int, std::weak_ptr<Watch>> by_task;

  static Watches& instance() {
    static Watches& watches = *new Watches;  // autograd's threads may outlive static destructors
    return watches;
  }
};

// Who has joined one graph task. Owned by the callback on that task.
class Watch {
 public:
  explicit Watch(int task) : task_(task) {}
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
  ~Watch() {
    {
      Watches& watches = Watches::instance();
      const std::lock_guard lock(watches.mutex);
      const auto entry = watches.by_task.find(task_);
      if (entry != watches.by_task.end() && entry->second.expired()) watches.by_task.erase(entry);
    }
    for (const auto& listener : listeners_) {
      if (const auto target = listener.lock()) target->abort_pass();
    }
  }

  void join(const std::shared_ptr<BackwardListener>& listener) {
    const auto same = [&](const auto& other) { return !other.owner_before(listener) && !listener.owner_before(other); };
    if (std::none_of(listeners_.begin(), listeners_.end(), same)) listeners_.push_back(listener);
  }

  std::vector<std::weak_ptr<BackwardListener>> take() { return std::exchange(listeners_, {}); }

 private:
  const int task_;
  std::vector<std::weak_ptr<BackwardListener>> listeners_;
};

// Sits on a node of an outer graph, which may live for many passes, and joins the task that evaluates it.
struct Rejoin final : torch::autograd::FunctionPreHook {
  variable_list operator()(const variable_list& gradients) override {
    for (const auto& listener : std::exchange(listeners, {})) {
      if (const auto target = listener.lock()) join_backward(target);
    }
    return gradients;
  }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs&) const override { refuse_compiled_autograd(); }

  std::vector<std::weak_ptr<BackwardListener>> listeners;
};

// False when nothing follows `node`.
bool rejoin_after(const torch::autograd::Node& node, const std::vector<std::shared_ptr<BackwardListener>>& listeners) {
  for (const torch::autograd::Edge& edge : node.next_edges()) {
    if (!edge.is_valid()) continue;
    Rejoin* rejoin = nullptr;
    for (const auto& hook : edge.function->pre_hooks()) {
      if (rejoin == nullptr) rejoin = dynamic_cast<Rejoin*>(hook.get());
    }
    if (rejoin == nullptr) {
      auto made = std::make_unique<Rejoin>();
      rejoin = made.get();
      edge.function->add_pre_hook(std::move(made));
    }
    for (const auto& listener : listeners) rejoin->listeners.emplace_back(listener);
    return true;
  }
  return false;
}

void ended(int task, const std::shared_ptr<Watch>& watch) {
  std::vector<std::weak_ptr<BackwardListener>> weak;
  {
    Watches& watches = Watches::instance();
    const std::lock_guard lock(watches.mutex);
    watches.by_task.erase(task);
    weak = watch->take();
  }
  std::vector<std::shared_ptr<BackwardListener>> listeners;
  for (const auto& listener : weak) {
    if (auto target = listener.lock()) listeners.push_back(std::move(target));
  }
  if (const auto node = torch::autograd::get_current_node(); node && rejoin_after(*node, listeners)) return;
  std::sort(listeners.begin(), listeners.end(), [](const auto& a, const auto& b) { return a->order() < b->order(); });
  std::exception_ptr first;
  const auto attempt = [&first](auto&& call) {
    try {
      call();
    } catch (...) {
      if (!first) first = std::current_exception();
    }
  };
  for (const auto& listener : listeners) attempt([&] { listener->end_pass(); });
  for (const auto& listener : listeners) attempt([&] { listener->settle_pass(); });
  if (first) std::rethrow_exception(first);
}

std::vector<std::unique_ptr<torch::autograd::FunctionPreHook>>& parameter_hooks(const at::Tensor& parameter) {
  torch::autograd::impl::materialize_autograd_meta(parameter);
  return torch::autograd::impl::hooks(parameter);
}

}  // namespace

bool AccumulatorHook::follows(const at::Tensor& parameter) const {
  return node_ && torch::autograd::impl::try_get_grad_accumulator(parameter) == node_;
}

void AccumulatorHook::attach(const at::Tensor& parameter, const std::weak_ptr<BackwardListener>& listener,
                             size_t slot) {
  if (parameter.requires_grad() && !follows(parameter)) move(parameter, listener, slot);
  auto& hooks = parameter_hooks(parameter);
  if (std::any_of(hooks.begin(), hooks.end(), [this](const auto& hook) { return hook.get() == mover_; })) return;
  auto mover = std::make_unique<Mover>(listener, slot);
  mover_ = mover.get();
  hooks.push_back(std::move(mover));  // beside Python's; impl::add_hook allows only one
}

void AccumulatorHook::move(const at::Tensor& parameter, const std::weak_ptr<BackwardListener>& listener, size_t slot) {
  leave();
  node_ = torch::autograd::impl::grad_accumulator(parameter);
  auto pre_hook = std::make_unique<PreHook>(listener, slot);
  pre_hook_ = pre_hook.get();
  node_->add_pre_hook(std::move(pre_hook));
  post_key_ = node_->add_post_hook(std::make_unique<PostHook>(listener, slot));
}

void AccumulatorHook::detach(const at::Tensor& parameter) {
  leave();
  if (mover_ == nullptr) return;
  std::erase_if(parameter_hooks(parameter), [this](const auto& hook) { return hook.get() == mover_; });
  mover_ = nullptr;
}

void AccumulatorHook::leave() {
  if (!node_) return;
  node_->del_post_hook(post_key_);
  std::erase_if(node_->pre_hooks(), [this](const auto& hook) { return hook.get() == pre_hook_; });
  node_ = {};
}

int join_backward(const std::shared_ptr<BackwardListener>& listener) {
  const int task = current_backward();
  std::shared_ptr<Watch> created;
  {
    Watches& watches = Watches::instance();
    const std::lock_guard lock(watches.mutex);
    std::weak_ptr<Watch>& entry = watches.by_task[task];
    std::shared_ptr<Watch> watch = entry.lock();
    if (!watch) entry = watch = created = std::make_shared<Watch>(task);
    watch->join(listener);
  }
  if (created) {
    torch::autograd::Engine::get_default_engine().queue_callback([task, created] { ended(task, created); });
  }
  return task;
}

int current_backward() { return torch::autograd::get_current_graph_task_id(); }

}  // namespace fusewire
