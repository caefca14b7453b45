// Engine, its endpoints and its life cycle for Python.
#include <pthread.h>
#include <torch/csrc/utils/pybind.h>

#include <chrono>
#include <cmath>
#include <map>
#include <mutex>
#include <optional>
#include <set>

#include "collective/nccl/nccl_loader.h"
#include "torch/arguments.h"
#include "torch/py_engine.h"
#include "torch/python_errors.h"
#include "torch/stacks.h"

namespace fusewire::binding {
namespace {

using Knobs = std::map<std::string, std::string>;
using NoGil = py::call_guard<py::gil_scoped_release>;

// The environment first, init()'s keywords over it.
Config make_config(const Knobs& knobs) {
  Config config = Config::from_environment();
  for (const auto& [keyword, value] : knobs) config.set(keyword, value);
  return config;
}

// Every engine of this process, for the moment when the process forks, whoever forks it. A child has only the thread
// that forked, so the list is locked across the fork: no other thread can be halfway through changing it.
struct Living {
  std::mutex mutex;
  std::set<Engine*> engines;

  static Living& instance() {
    static Living& living = *[] {
      pthread_atfork([] { instance().mutex.lock(); }, [] { instance().mutex.unlock(); },
                     [] {
                       for (Engine* engine : instance().engines) engine->abandon_after_fork();
                       instance().mutex.unlock();
                     });
      return new Living;  // never destroyed: a fork may come at any time
    }();
    return living;
  }
};

std::chrono::milliseconds milliseconds(double seconds) {
  return std::chrono::milliseconds(std::llround(seconds * 1000));
}

std::vector<PyEnginePtr> make_in_process_engines(int size, const Knobs& knobs) {
  const Config config = make_config(knobs);
  std::vector<PyEnginePtr> engines;
  for (auto& endpoint : make_in_process_fabric(size)) {
    engines.push_back(std::make_shared<PyEngine>(std::move(endpoint), config));
  }
  return engines;
}

PyEnginePtr accept_all(UnixListener& listener, double timeout, const Knobs& knobs) {
  const Config config = make_config(knobs);
  return std::make_shared<PyEngine>(listener.accept_all(milliseconds(timeout)), config);
}

PyEnginePtr connect(const std::string& address, int rank, int size, const std::string& secret, double timeout,
                    const Knobs& knobs) {
  const Config config = make_config(knobs);
  return std::make_shared<PyEngine>(connect_unix(address, rank, size, secret, milliseconds(timeout)), config);
}

py::dict stats_of(PyEngine& engine) {
  const EngineStats stats = engine.get().stats();
  py::dict result;
  result["units"] = stats.units();
  result["buckets"] = stats.buckets();
  result["bytes"] = stats.bytes();
  result["failed"] = stats.failed;
  result["skipped"] = stats.skipped;
  result["inline_buckets"] = stats.inline_buckets;
  result["executor_buckets"] = stats.executor_buckets;
  result["gpu_buckets"] = stats.gpu_buckets;
  result["plane_seconds"] = stats.plane_seconds;
  result["cache_hits"] = stats.cache.hits;
  result["cache_misses"] = stats.cache.misses;
  result["cache_evictions"] = stats.cache.evictions;
  py::dict operations;
  for (int kind = 0; kind < kOpKindCount; ++kind) {
    const OperationStats& operation = stats.operations[static_cast<size_t>(kind)];
    operations[py::str(std::string(to_string(static_cast<OpKind>(kind))))] =
        py::make_tuple(operation.units, operation.buckets, operation.bytes);
  }
  result["operations"] = operations;
  const auto bins_of = [](const HistogramSnapshot& histogram) {
    py::list bins;
    for (const HistogramSnapshot::Bin& bin : histogram.bins) bins.append(py::make_tuple(bin.most, bin.count));
    return bins;
  };
  result["negotiation_ns"] = bins_of(stats.negotiation);
  result["bucket_units"] = bins_of(stats.bucket_units);
  result["bucket_bytes"] = bins_of(stats.bucket_bytes);
  return result;
}

void raise_failure(PyEngine& engine) {
  if (const auto error = engine.get().failure()) throw *error;
}

}  // namespace

PyEngine::PyEngine(std::unique_ptr<Endpoint> endpoint, const Config& config)
    : engine_(std::make_unique<Engine>(std::move(endpoint), config, [this](int index) { return open_gpu(index); })) {
  engine_->set_activity_source(process_stacks);
  Living& living = Living::instance();
  const std::lock_guard lock(living.mutex);
  living.engines.insert(engine_.get());
}

PyEngine::~PyEngine() {
  {
    Living& living = Living::instance();
    const std::lock_guard lock(living.mutex);
    living.engines.erase(engine_.get());
  }
  // The last reference may also be dropped by a thread of autograd, which does not hold the GIL.
  std::optional<py::gil_scoped_release> no_gil;
  if (PyGILState_Check()) no_gil.emplace();
  engine_.reset();
}

gpu::Gpu& PyEngine::gpu(int index) {
  int current = gpu_.load();
  if (current != index && (current >= 0 || !gpu_.compare_exchange_strong(current, index)) && current != index) {
    invalid("a tensor is on cuda:" + std::to_string(index) + ", but this rank has used cuda:" +
            std::to_string(current) + ", and a rank uses one GPU: start one rank per GPU and choose it first, by " +
            "torch.cuda.set_device(fusewire.local_rank())");
  }
  return gpu::get(index);
}

OpenGpu PyEngine::open_gpu(int index) {
  if (index < 0) index = expected_gpu_.load();
  if (index < 0) {
    throw Error(ErrorCode::kInvalidArgument, "other ranks communicate CUDA tensors, and this rank has no GPU");
  }
  OpenGpu result;
  result.device = gpu(index).device();
  result.nccl = find_nccl(&result.no_nccl);
  return result;
}

std::string PyEngine::unnamed(std::string_view kind, uint32_t process_set) {
  std::string name(kind);
  name += ".noname.";
  uint64_t& counter = counters_[process_set == 0 ? name : name + std::to_string(process_set) + "."];
  return name + std::to_string(counter++);
}

PyEnginePtr& default_engine() {
  // Never destroyed: the interpreter may be gone by then.
  static auto& engine = *new PyEnginePtr;
  return engine;
}

const PyEnginePtr& engine_of(PyObject* argument, PyEnginePtr& holder) {
  if (argument == Py_None) {
    const PyEnginePtr& engine = default_engine();
    if (!engine) {
      throw Error(ErrorCode::kNotInitialized, "Fusewire is not running in this process; call fusewire.init() first");
    }
    return engine;
  }
  return holder = py::cast<PyEnginePtr>(py::handle(argument));
}

void register_engine(py::module_& module) {
  py::class_<PyEngine, PyEnginePtr>(
      module, "Engine",
      "One rank's engine. fusewire.init() makes the default one; tests make several as threads of one process.")
      .def_property_readonly("rank", [](PyEngine& engine) { return engine.get().rank(); })
      .def_property_readonly("data_plane", [](PyEngine& engine) { return engine.get().data_plane(); })
      .def_property_readonly(
          "gpu_data_plane",
          [](PyEngine& engine) {
            std::string reason;
            std::string name = engine.get().gpu_data_plane(&reason);
            return py::make_tuple(name, reason);
          },
          "(what moves CUDA tensors, '' before the first of them; why it is not NCCL)")
      .def_property_readonly("size", [](PyEngine& engine) { return engine.get().size(); })
      .def(
          "shutdown", [](PyEngine& engine, bool clean, const std::string& why) { engine.get().shutdown(clean, why); },
          py::arg("clean") = true, py::arg("reason") = "shutdown() was called", NoGil(),
          "Leaves the job: pending operations fail with ShutdownError, peers are told the reason. Idempotent.")
      .def("raise_failure", raise_failure, "Raises the error that has failed the engine for good, if any.")
      .def(
          "members", [](PyEngine& engine, uint32_t set) { return engine.get().members(set); }, py::arg("process_set"),
          "Global ranks of a process set, sorted. Raises ValueError when there is no such set.")
      .def("next_optimizer", &PyEngine::next_optimizer, py::arg("process_set"),
           "A prefix for the names of one optimizer's operations; ranks that ask in the same order get the same.")
      .def("stats", stats_of, "What the engine has counted since it was made: see fusewire.stats().")
      .def(
          "start_timeline",
          [](PyEngine& engine, const std::string& path, bool mark_cycles) {
            engine.get().start_timeline(path, mark_cycles);
          },
          py::arg("path"), py::arg("mark_cycles") = false, NoGil(), "See fusewire.start_timeline().")
      .def(
          "stop_timeline", [](PyEngine& engine) { engine.get().stop_timeline(); }, NoGil())
      .def_property_readonly("pending", [](PyEngine& engine) { return engine.get().pending(); })
      .def("abandon_after_fork", [](PyEngine& engine) { engine.get().abandon_after_fork(); });

  py::class_<UnixListener>(module, "UnixListener", "Where rank 0 waits for the other ranks of its host.")
      .def_property_readonly("address", &UnixListener::address)
      .def("accept_all", accept_all, py::arg("timeout"), py::arg("knobs") = Knobs{}, NoGil(),
           "Waits `timeout` seconds for all ranks; returns rank 0's Engine. Raises PeerLostError naming who is "
           "missing.");

  module.def("make_in_process_engines", make_in_process_engines, py::arg("size"), py::arg("knobs") = Knobs{}, NoGil(),
             "`size` engines, ranks as threads of this process.");
  module.def("listen_unix", listen_unix, py::arg("size"), py::arg("secret"), NoGil());
  module.def("connect_unix", connect, py::arg("address"), py::arg("rank"), py::arg("size"), py::arg("secret"),
             py::arg("timeout"), py::arg("knobs") = Knobs{}, NoGil(),
             "Joins the listener at `address` within `timeout` seconds; returns this rank's Engine.");
  module.def(
      "check_config", [](const Knobs& knobs) { make_config(knobs); }, py::arg("knobs"), NoGil(),
      "Raises ValueError for a bad environment variable or keyword.");
  module.def("set_default_engine", [](PyEnginePtr engine) { std::swap(default_engine(), engine); });
  module.def("get_default_engine", [] { return default_engine(); });
}

}  // namespace fusewire::binding
