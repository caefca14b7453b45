// From what a caller submits to what the control plane negotiates.
#pragma once

#include "control/message.h"
#include "engine/engine.h"
#include "engine/in_flight.h"

namespace fusewire {

// Takes the submission's name (a join and an adoption have one of their own) and ranks. Makes its extents complete:
// those of an allgather follow from its inputs, and a tensor that is absent brings no rows. Throws Error(kInvalidType)
// where an operator has no meaning for a dtype, Error(kInvalidArgument) where an operation makes no sense with such a
// tensor.
UnitSpec describe(Submission& submission);

// What this rank has to do with a unit that it has not submitted: nothing to contribute, nothing wanted, nobody to
// tell.
InFlight unasked(const UnitSpec& spec);

}  // namespace fusewire
