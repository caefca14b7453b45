// Reduces a range of a row from all ranks' staging straight into this rank's outputs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "collective/shm_context.h"

namespace fusewire {

// context.bases[r] is rank r's contribution to element `begin` of `cursor`'s row and what follows, in its slot; this
// rank's own one has been gathered at least where the cursor says !in_place(). Results go to the outputs. They also go
// to `results` (element `begin` first): all of them if `publish_results`, else `results` is only scratch memory of that
// size. `results` may be one of the bases.
void shm_reduce_home(ShmContext& context, BucketCursor& cursor, const Reduction& reduction, int64_t begin, int64_t end,
                     std::byte* results, bool publish_results);

}  // namespace fusewire
