#include "torch/bind_planes.h"

#include <chrono>
#include <cmath>

#include "collective/mpi/mpi_loader.h"
#include "collective/nccl/nccl_loader.h"
#include "common/config.h"

namespace py = pybind11;

namespace fusewire::binding {
namespace {

py::dict mpi_facts_for_python() {
  MpiFacts facts;
  {
    const py::gil_scoped_release no_gil;
    facts = mpi_facts(Config::from_environment().mpi_module);
  }
  py::dict result;
  result["built"] = facts.built;
  result["library"] = facts.library;
  result["problem"] = facts.problem;
  result["started"] = facts.started;
  result["threads"] = facts.threads;
  return result;
}

py::dict nccl_facts_for_python() {
  NcclFacts facts;
  {
    const py::gil_scoped_release no_gil;
    facts = nccl_facts();
  }
  py::dict features;
  for (const NcclFacts::Feature& feature : facts.features) features[py::str(feature.name)] = feature.why_off;
  py::dict result;
  result["version"] = facts.version;
  result["text"] = facts.version != 0 ? nccl_version_text(facts.version) : std::string();
  result["path"] = facts.path;
  result["problem"] = facts.problem;
  result["features"] = features;
  return result;
}

}  // namespace

void register_planes(py::module_& module) {
  module.def("mpi_facts", mpi_facts_for_python,
             "Loads the MPI module, if there is one: whether it is built, the library it uses, why it cannot be used, "
             "whether MPI runs in this process, and its thread level then. Never initialises MPI.");
  module.def("nccl_facts", nccl_facts_for_python,
             "Looks for the NCCL that torch has loaded: its version (as NCCL codes it, and as text), its path, why it "
             "cannot be used, and for each optional feature why it is off (\"\": it is there).");
  module.def(
      "finish_mpi", [](double seconds) { finish_mpi(std::chrono::milliseconds(std::llround(seconds * 1000))); },
      py::arg("seconds"), py::call_guard<py::gil_scoped_release>(),
      "At exit: finalises MPI if this process's engine has initialised it and all is well; waits so long at most.");
}

}  // namespace fusewire::binding
