// From an answered bucket of units to what the data plane runs.
#pragma once

#include <vector>

#include "control/participant.h"
#include "engine/executor.h"
#include "engine/in_flight.h"

namespace fusewire {

// `units` in the order of `work.units`; takes their tensors and handles, the latter last: if it throws (there is no
// memory), they are where they were. Makes the outputs whose shape is only known now; if that fails, so does the
// assignment, for which `rank` is to blame, this rank of the job.
Assignment make_assignment(const Work& work, std::vector<InFlight>& units, std::shared_ptr<Plane> plane, int rank);

}  // namespace fusewire
