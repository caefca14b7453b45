// The words for ranks that disagree about one unit.
#pragma once

#include <string>

#include "control/unit.h"

namespace fusewire {

// "allreduce 'x': shape differs: rank 0 has [2, 3], ranks 1, 2 have [3, 2]; what to do". `unit` has dissents.
std::string describe_mismatch(const Unit& unit);

// "allreduce 'x'", "allreduce 'x' in process set 2".
std::string describe_unit(const UnitSpec& spec);

}  // namespace fusewire
