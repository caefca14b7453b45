// The engine's work in traces of torch.profiler.
#pragma once

#include "engine/engine.h"

namespace fusewire {

// Note [Profiler ranges]
// While torch's profiler is active on the thread that submits, the unit shows up as ranges of record_function, as
// c10d's collectives do:
//
//   fusewire::allreduce    (or another kind) from submission to completion
//   fusewire::negotiate    until all ranks had submitted it
//   fusewire::queue        until its bucket began
//   fusewire::run          its bucket, on whatever thread ran it
//
// They begin and end on different threads, so they are asynchronous ranges; the profiler belongs to a thread, so its
// state travels with the unit. Torch frees a session's events when the profiler stops: what is still in flight then
// must not touch them, and stays without an end.
//
// Without a profiler this costs a look at a thread-local pointer.
void profile(Submission& submission);

}  // namespace fusewire
