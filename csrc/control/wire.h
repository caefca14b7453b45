// Messages as bytes. Little-endian, varint counts and ids. Decoding trusts nothing: every count is checked against the
// bytes that are left, every enum against its range; a malformed frame throws Error(kInvalidArgument).
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "control/message.h"

namespace fusewire {

std::vector<std::byte> encode(const RequestList& message);
std::vector<std::byte> encode(const ResponseList& message);
RequestList decode_requests(std::span<const std::byte> frame);
ResponseList decode_responses(std::span<const std::byte> frame);

}  // namespace fusewire
