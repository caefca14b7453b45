#pragma once

#include <cstddef>
#include <cstdint>

#include "collective/shm_context.h"

namespace fusewire {

// Moves rows that every rank gives to others. context.rows[r] describes what rank r gives: of the row that all agree
// on, the stretch that this rank takes (all of it, with its inputs, for r = this rank). `own` is what this rank gives
// to itself. `longest` is the number of elements in the longest row and `most_parts` at least the number of its parts,
// both the same on all ranks.
void shm_exchange(ShmContext& context, BucketCursor& own, int64_t longest, size_t most_parts);

// The same by reading the givers' memory; false, on all ranks alike, where that cannot be.
bool shm_exchange_directly(ShmContext& context, BucketCursor& own, size_t most_parts);

}  // namespace fusewire
