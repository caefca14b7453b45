// One exception class with a code. The binding turns each code into the Python class of the same name; the wire format
// carries (code, rank, message), so every rank raises the same error.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace fusewire {

enum class ErrorCode : uint8_t {
  kNotInitialized,
  kTensorMismatch,  // per tensor: the engine stays usable
  kDuplicateName,   // per tensor: the engine stays usable
  kPeerLost,        // this and all below: the engine stays failed until shutdown
  kStalled,
  kCollective,
  kShutdown,
  kInvalidArgument,  // a caller's mistake, ValueError in Python: the engine stays usable
  kInvalidType,      // TypeError in Python: the engine stays usable
  kInternal,         // a bug in Fusewire
};
inline constexpr int kErrorCodeCount = 10;

std::string_view to_string(ErrorCode code);  // "PeerLostError", the Python class name

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message, int rank = -1)
      : std::runtime_error(message), code_(code), rank_(rank) {}
  ErrorCode code() const { return code_; }
  int rank() const { return rank_; }  // the rank at fault, -1 where there is no single one

 private:
  ErrorCode code_;
  int rank_;
};

// Errors after which no collective can be trusted any more.
inline bool is_fatal(ErrorCode code) {
  return code == ErrorCode::kPeerLost || code == ErrorCode::kStalled || code == ErrorCode::kCollective ||
         code == ErrorCode::kShutdown || code == ErrorCode::kInternal;
}

}  // namespace fusewire
