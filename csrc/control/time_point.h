// Time as control/ knows it: always handed in from outside, so that tests move it.
#pragma once

#include <chrono>

namespace fusewire {

using TimePoint = std::chrono::steady_clock::time_point;

}  // namespace fusewire
