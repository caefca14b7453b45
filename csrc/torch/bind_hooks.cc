#include "torch/bind_hooks.h"

#include <memory>
#include <utility>

#include "torch/grad_reducer.h"
#include "torch/py_engine.h"

namespace fusewire::binding {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

// A reference that any thread may drop.
std::shared_ptr<void> shared(py::object object) {
  return std::shared_ptr<void>(object.release().ptr(), [](void* pointer) {
    if (Py_IsInitialized() == 0) return;
    py::gil_scoped_acquire gil;
    Py_DECREF(static_cast<PyObject*>(pointer));
  });
}

py::handle borrowed(const std::shared_ptr<void>& object) { return static_cast<PyObject*>(object.get()); }

// A callable: (prefix, [(name, parameter, value or None, sparse)]) -> [tensor].
class PythonExchange final : public Exchange {
 public:
  explicit PythonExchange(py::object callable) : callable_(shared(std::move(callable))) {}

  std::vector<at::Tensor> run(const std::string& prefix, const std::vector<Item>& items) override {
    py::gil_scoped_acquire gil;
    py::list list;
    for (const Item& item : items) {
      const py::object value = item.value.defined() ? py::cast(item.value) : py::none();
      list.append(py::make_tuple(item.name, item.parameter, value, item.sparse));
    }
    return borrowed(callable_)(prefix, list).cast<std::vector<at::Tensor>>();
  }

 private:
  std::shared_ptr<void> callable_;
};

// What the Python optimizer owns. The hooks refer to the reducer weakly, so letting go of this ends the reducer.
class Reducer {
 public:
  explicit Reducer(ReducerOptions options) : reducer_(std::make_shared<GradReducer>(std::move(options))) {}
  Reducer(const Reducer&) = delete;
  Reducer& operator=(const Reducer&) = delete;
  ~Reducer() {
    py::gil_scoped_release no_gil;
    reducer_->close();
    reducer_.reset();
  }

  GradReducer& get() { return *reducer_; }

 private:
  std::shared_ptr<GradReducer> reducer_;
};

std::unique_ptr<Reducer> make_reducer(const py::object& engine, int op, double prescale, double postscale,
                                      uint32_t process_set, std::optional<int> wire, int passes, bool sparse_as_dense,
                                      py::object exchange, bool compressed) {
  PyEnginePtr holder;
  ReducerOptions options;
  options.engine = engine_of(engine.ptr(), holder);
  options.prefix = options.engine->next_optimizer(process_set);
  options.op = static_cast<ReduceOp>(op);
  options.prescale = prescale;
  options.postscale = postscale;
  options.process_set = process_set;
  if (wire) options.wire = static_cast<DataType>(*wire);
  options.passes = passes;
  options.sparse_as_dense = sparse_as_dense;
  options.exchange = std::make_unique<PythonExchange>(std::move(exchange));
  options.compressed = compressed;
  return std::make_unique<Reducer>(std::move(options));
}

}  // namespace

void register_hooks(py::module_& module) {
  py::class_<Reducer>(module, "GradReducer", "The gradients of one optimizer. See csrc/torch/grad_reducer.h.")
      .def(py::init(&make_reducer), py::arg("engine"), py::arg("op"), py::arg("prescale"), py::arg("postscale"),
           py::arg("process_set"), py::arg("wire"), py::arg("passes"), py::arg("sparse_as_dense"), py::arg("exchange"),
           py::arg("compressed"))
      .def(
          "add",
          [](Reducer& reducer, const std::vector<std::string>& names, const std::vector<at::Tensor>& parameters,
             bool missed) { reducer.get().add(names, parameters, missed); },
          py::arg("names"), py::arg("parameters"), py::arg("missed"), NoGil())
      .def(
          "synchronize", [](Reducer& reducer) { reducer.get().synchronize(); }, NoGil())
      .def(
          "rebind",
          [](Reducer& reducer, const PyEnginePtr& engine, uint32_t process_set) {
            std::string prefix = engine->next_optimizer(process_set);
            py::gil_scoped_release no_gil;
            reducer.get().rebind(engine, std::move(prefix), process_set);
          },
          py::arg("engine"), py::arg("process_set"), "Goes on with another engine.")
      .def(
          "expire", [](Reducer& reducer) { reducer.get().expire(); }, NoGil())
      .def(
          "close", [](Reducer& reducer) { reducer.get().close(); }, NoGil())
      .def(
          "set_passes", [](Reducer& reducer, int passes) { reducer.get().set_passes(passes); }, NoGil())
      .def("owns_any", [](Reducer& reducer) { return reducer.get().owns_any(); }, NoGil());
}

}  // namespace fusewire::binding
