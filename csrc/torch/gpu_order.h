// What orders an operation on CUDA tensors with the streams of its callers: see Note [Streams of a GPU].
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "engine/engine.h"
#include "torch/py_engine.h"

namespace fusewire::gpu {

// For a submission that is complete, just before it goes to the engine: its CUDA tensors may be used once the calling
// thread's current stream has come so far, but for those that have a ready_event already; `events` owns the latter.
// Nothing happens where there are no CUDA tensors. Throws Error(kInvalidArgument) for tensors on two GPUs, and while
// the stream is captured into a CUDA graph.
void follow_current(binding::PyEngine& engine, Submission& submission, std::vector<SharedEvent> events = {});

// What is put on the calling thread's current stream from now on comes after these units, which are done().
void hold_up_current(binding::PyEngine& engine, std::span<const Handle> handles);

}  // namespace fusewire::gpu
