// How Fusewire starts a thread.
#pragma once

#include <functional>
#include <thread>

namespace fusewire {

// Named (at most 15 characters), with all signals blocked: handlers belong to the user's threads, and an interrupted
// sleep there is how Ctrl-C is noticed. SCHED_BATCH, so that waking it never preempts a thread that computes: on a
// machine without a free core it runs when that thread pauses or its time slice ends, elsewhere at once.
std::thread start_thread(const char* name, std::function<void()> body);

}  // namespace fusewire
