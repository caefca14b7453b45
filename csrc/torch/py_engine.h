// An Engine as Python holds it, and the process's default one.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <atomic>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>

#include "engine/engine.h"
#include "torch/gpu.h"

namespace fusewire::binding {

class PyEngine {
 public:
  PyEngine(std::unique_ptr<Endpoint> endpoint, const Config& config);
  ~PyEngine();  // shuts down, with the GIL released
  PyEngine(const PyEngine&) = delete;
  PyEngine& operator=(const PyEngine&) = delete;

  Engine& get() { return *engine_; }

  // GPU number `index`, which is this engine's one and only from now on. Throws Error(kInvalidArgument) where it has
  // another one, and what gpu::get() throws. Any thread.
  gpu::Gpu& gpu(int index);
  bool has_gpu() const { return gpu_.load(std::memory_order_relaxed) >= 0; }
  gpu::Gpu& gpu() { return gpu::get(gpu_.load()); }  // where it has one
  // The one to use where only others have CUDA tensors; -1: none.
  void expect_gpu(int index) { expected_gpu_.store(index); }

  // "allreduce.noname.3": the third unnamed operation of that kind in that process set. Ranks that call in the same
  // order choose the same names. Needs the GIL, which orders the callers.
  std::string unnamed(std::string_view kind, uint32_t process_set);

  // After join(): ranks that had joined have missed some calls, and nothing is in flight anywhere, so that all ranks
  // count from the beginning again. Needs the GIL.
  void recount_unnamed() { counters_.clear(); }

  // "opt3": the fourth optimizer wrapped in that process set (only its members count them). Needs the GIL.
  std::string next_optimizer(uint32_t process_set) { return "opt" + std::to_string(optimizers_[process_set]++); }

 private:
  OpenGpu open_gpu(int index);  // see GpuOpener

  std::atomic<int> gpu_{-1};  // -1: none yet
  std::atomic<int> expected_gpu_{-1};
  std::unique_ptr<Engine> engine_;
  std::unordered_map<uint32_t, uint64_t> optimizers_;
  std::unordered_map<std::string, uint64_t> counters_;
};

using PyEnginePtr = std::shared_ptr<PyEngine>;

// The engine an operation runs on: the argument, or the default where it is None. Throws Error(kNotInitialized).
const PyEnginePtr& engine_of(PyObject* argument, PyEnginePtr& holder);

// The default engine (null: none). Needs the GIL.
PyEnginePtr& default_engine();

void register_engine(py::module_& module);

}  // namespace fusewire::binding
