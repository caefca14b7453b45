// From what a caller submits to what the control plane negotiates.
#pragma once

#include "control/message.h"
#include "engine/engine.h"

namespace fusewire {

// Takes the submission's name and ranks. Makes its extents complete: those of an allgather follow from its inputs, and
// a tensor that is absent brings no rows. Throws Error(kInvalidType) where an operator has no meaning for a dtype,
// Error(kInvalidArgument) where an operation makes no sense with such a tensor.
UnitSpec describe(Submission& submission);

}  // namespace fusewire
