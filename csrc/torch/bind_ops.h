// The collectives for Python, as METH_FASTCALL functions with positional arguments: a training step makes hundreds of
// these calls, and pybind11's dispatch would cost as much as the rest of a submission.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace fusewire::binding {

void register_ops(py::module_& module);     // allreduce, broadcast
void register_gather(py::module_& module);  // allgather, alltoall, reducescatter
void register_sets(py::module_& module);    // barrier, join, process sets

}  // namespace fusewire::binding
