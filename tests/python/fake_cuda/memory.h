// Memory of the pretended GPUs: the host's, with what torch's caching allocator promises about streams.
//
// Note [Freed on its stream]
// Memory belongs to the stream that was current when it was allocated, and may be given away again to whatever comes
// next on that stream. So freeing it counts as a write on that stream, after the work of all streams that
// record_stream() has named. Work on any other stream that still uses it then is a mistake.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstddef>

namespace fusewire::fake {

c10::Allocator& allocator();

// What a kernel on the CPU has allocated becomes memory of the current device. Keeps `owner`.
c10::DataPtr adopt(c10::DataPtr owner, size_t bytes);

void record_stream(const c10::DataPtr& memory, const c10::Stream& stream);

c10::Allocator& pinned_allocator();
bool is_pinned(const void* memory);

}  // namespace fusewire::fake
