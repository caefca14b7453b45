#include "common/error.h"

#include <array>

namespace fusewire {

std::string_view to_string(ErrorCode code) {
  static constexpr std::array<std::string_view, kErrorCodeCount> kNames = {
      "NotInitializedError", "TensorMismatchError", "DuplicateNameError", "PeerLostError", "StalledError",
      "CollectiveError",     "ShutdownError",       "ValueError",         "TypeError",     "FusewireError"};
  return kNames.at(static_cast<size_t>(code));
}

}  // namespace fusewire
