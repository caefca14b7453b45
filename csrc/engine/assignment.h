// From an answered bucket of units to what the data plane runs.
#pragma once

#include <vector>

#include "control/participant.h"
#include "engine/executor.h"
#include "engine/in_flight.h"

namespace fusewire {

// `units` in the order of `work.units`; takes their tensors and handles. `rank_count` is the size of the process set,
// `root` the broadcast root's rank inside it.
Assignment make_assignment(const Work& work, std::vector<InFlight> units, std::shared_ptr<Plane> plane);

}  // namespace fusewire
