// What this process does, for rank 0's stall report: the Python stacks of its threads.
#pragma once

#include <torch/csrc/utils/pybind.h>

#include <string>

namespace fusewire::binding {

// Note [Stacks]
// The polite way first: a Python thread of ours ("fusewire-stacks", see python/fusewire/_stacks.py) waits here without
// the GIL; when asked it takes the GIL, which it gets within milliseconds from a thread that runs Python or waits
// without it, and formats sys._current_frames(). If no answer comes in kPolitePatience, somebody holds the GIL in C, so
// frames do not move, and CPython's own dump for fatal errors may read them without it. That is what faulthandler does
// from its watchdog thread, and as safe: if the GIL is released at that very moment, a line may be wrong.
//
// Any thread, without the GIL. At most half a second, at most kLongestActivity bytes.
std::string process_stacks();

void register_stacks(py::module_& module);

}  // namespace fusewire::binding
