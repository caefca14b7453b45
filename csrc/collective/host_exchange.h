// What members of a process set tell each other in the middle of a bucket: facts of equal size, by the set's data plane
// for CPU tensors.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "collective/backend.h"

namespace fusewire {

// Everybody's bytes in member order. All members call it at the same place in the order of their buckets. Throws what
// the plane throws.
std::vector<std::byte> exchange_on_host(Backend& plane, int size, std::span<const std::byte> mine);

}  // namespace fusewire
