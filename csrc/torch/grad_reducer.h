// The gradients of one optimizer: which of them to reduce when, and what becomes of the results.
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/types.h"
#include "engine/engine.h"
#include "torch/grad_hooks.h"
#include "torch/grad_leftovers.h"
#include "torch/py_engine.h"

namespace fusewire {

// How gradients travel that cannot travel as they are: compressed in Python, or sparse. It runs at the end of a window
// and takes the GIL itself. See Note [Apart].
class Exchange {
 public:
  virtual ~Exchange() = default;
  struct Item {
    std::string name;
    at::Tensor parameter;
    at::Tensor value;     // undefined: nothing here
    bool sparse = false;  // what comes back is sparse, too
  };
  // The combined value of each item. Communicates with all members of the process set, which bring the same items;
  // `prefix` is for the names on the wire.
  virtual std::vector<at::Tensor> run(const std::string& prefix, const std::vector<Item>& items) = 0;
};

struct ReducerOptions {
  binding::PyEnginePtr engine;
  std::string prefix;  // of the names on the wire, unique to this optimizer
  ReduceOp op = ReduceOp::kAverage;
  double prescale = 1.0;
  double postscale = 1.0;
  uint32_t process_set = 0;
  std::optional<DataType> wire;
  int passes = 1;  // backward passes per window
  bool sparse_as_dense = false;
  std::unique_ptr<Exchange> exchange;
  bool compressed = false;  // everything goes through the exchange, not only what is sparse
};

// Note [Passes and windows]
// A *pass* is one outermost backward; a *window* is `passes` of them. When the last pass of a window ends, every
// parameter has been submitted: with its gradient where one of its hooks fired in the window, else *absent* (a stale
// .grad still counts as its value if another rank has one). Then the thread that ran backward waits for all of them.
//
// A gradient leaves early, from its hook, only in the window's last pass and only where every earlier pass has shown it
// to fire exactly once. If it fires again all the same (a checkpointed layer used twice, say), the gradient in flight
// is set aside before autograd adds to it; what autograd computes from then on is a second contribution to the same
// sum. Whether any rank has such is agreed on by one more unit, the window's *flags*, in which ranks that have nothing
// to say are absent, so that it costs nothing but its bit; if some have, everybody reduces the second contributions too
// and adds the results.
//
// Note [Apart]
// Some gradients travel apart from the units: all of them where a compressor runs in Python, else sparse ones. A rank
// cannot know that a parameter which it does not use has a sparse gradient elsewhere. So a rank with a sparse gradient
// is absent in the parameter's unit, like everybody then, and raises a flag; who sees the flag takes part in the
// exchange that follows. Should some ranks have a dense gradient and others a sparse one, the unit sums the dense ones,
// the exchange the sparse ones, and the result is the sum of both. Exchanges of several optimizers run in the order of
// their names, the same on every rank.
//
// Note [Gradients on a GPU]
// A gradient that leaves from its hook is there once the stream has come so far that is current in the hook: the one of
// its AccumulateGrad node, which need not be that of the others in its group. At the end of a pass, and outside of one,
// all gradients are there for the current stream: autograd has made it wait for all others before it calls back. The
// thread that waits for a window waits until everything is launched and makes its current stream wait for the results;
// it never waits for the GPU.
//
// Lock order: mutex_ is never taken while the GIL is held, and nobody who holds it waits for it; torch may take the GIL
// under it. It is held while waiting for results: who comes meanwhile has to wait for them as well.
class GradReducer final : public BackwardListener, public std::enable_shared_from_this<GradReducer> {
 public:
  explicit GradReducer(ReducerOptions options) : options_(std::move(options)) {}
  ~GradReducer() override;

  // Takes over parameters from whoever owned them; several at once form an explicit group. `missed`: they have been in
  // use already without our hooks, so a .grad they have counts as this window's.
  void add(const std::vector<std::string>& names, const std::vector<at::Tensor>& parameters, bool missed);

  // Makes .grad final, unless it is: ends a partial window, stands in for a backward that this rank did not run.
  void synchronize();

  // The optimizer has used the gradients, or a closure is about to make new ones.
  void expire();

  // Goes on with another engine, after the old one has been shut down. What was in flight is forgotten.
  void rebind(binding::PyEnginePtr engine, std::string prefix, uint32_t process_set);

  // Lets go of all parameters. Thread-safe; a backward that is running finishes as if there were no reducer.
  void close();

  void set_passes(int passes);
  bool owns_any() const;

  void reach(size_t slot) override;
  void before_accumulate(size_t slot) override;
  void after_accumulate(size_t slot) override;
  std::pair<uint32_t, std::string> order() const override;
  void end_pass() override;
  void settle_pass() override;
  void abort_pass() noexcept override;

 private:
  enum class Flag { kAgain, kApart, kSparse };  // of a slot, in the window's flags

  struct Slot {
    std::string name;
    at::Tensor parameter;
    size_t unit = 0;
    bool owned = true;
    AccumulatorHook hook;

    // What earlier passes have shown.
    bool once = false;  // it fires exactly once in a pass
    bool late = false;  // it has fired more often: never launch it from its hook again

    int fires = 0;         // in this pass
    SharedEvent ready;     // on a GPU: the gradient is there, to be submitted from the hook
    bool present = false;  // it has fired in this window
    bool reduced = false;  // .grad holds the result of an earlier window, unless the user has reset it
    bool apart = false;    // in this window: see Note [Apart]

    bool settled = false;  // the unit has put a result into .grad, or `dense`
    at::Tensor dense;      // what the unit has summed, where .grad is sparse
    at::Tensor output;     // allocated for the result where .grad is None; kept for the next time when skipped
    at::Tensor set_aside;  // .grad in flight, when the parameter has fired again
  };

  struct Unit {
    std::string name;  // on the wire
    std::vector<size_t> slots;
    size_t arrived = 0;  // slots that have fired in this pass
    bool early = false;  // all of them may leave from their hooks
    Handle handle;       // null: not submitted in this window
  };

  // All of these need mutex_.
  void open_pass();
  void learn();                // from the pass that has ended
  void follow_accumulators();  // hooks what is not hooked (any more)
  void submit(Unit& unit);
  void submit_window();
  void wait_window();
  void settle_aborted();
  void reset_window();
  [[noreturn]] static void refuse_leftovers(const std::string& name);
  SubmittedTensor describe(Slot& slot, std::vector<at::Tensor>& alive, std::vector<SharedEvent>& events);
  at::Tensor reducible(const Slot& slot, const at::Tensor& gradient) const;
  bool is_apart(const Slot& slot) const;
  void settle(Slot& slot, bool skipped);
  void drop_gradients();
  void submit_flags();
  bool flagged(Flag flag, size_t slot) const;
  void obey_flags();
  void reduce_again();
  void exchange();
  Submission submission(std::string name) const;
  Handle launch(Submission submission, bool wake, std::vector<SharedEvent> events = {});
  gpu::Gpu& gpu_of(const at::Tensor& tensor) const { return options_.engine->gpu(tensor.get_device()); }
  Engine& engine() const { return options_.engine->get(); }

  void release(size_t slot);
  friend class Owners;

  ReducerOptions options_;
  mutable std::mutex mutex_;
  std::vector<Slot> slots_;
  std::vector<Unit> units_;
  int joined_ = -1;          // the graph task whose end we have joined
  bool pass_open_ = false;   // a hook has fired in a pass that has not ended
  int passes_done_ = 0;      // in this window
  bool final_ = false;       // .grad is final: nothing has fired since the window ended
  bool aborted_ = false;     // a backward ended with an exception, and what it left in flight is not settled
  bool submitted_ = false;   // the window's end has been submitted and not settled
  int64_t unannounced_ = 0;  // bytes submitted without waking the coordinator
  Handle flags_handle_;      // see Note [Passes and windows]
  at::Tensor flags_;         // int32: one per Flag and slot, then 1 + the rank whose backward has raised, or 0
  Leftovers leftovers_;
  bool discard_ = false;  // the window being settled was aborted: take part, touch nothing
};

}  // namespace fusewire
