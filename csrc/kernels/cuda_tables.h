// What the tables hold that the host writes and the CUDA kernels read. Plain C++17 without CUDA headers: both sides
// include it.
#pragma once

#include <stdint.h>

namespace fusewire::cuda {

// Note [Tiles]
// A launch has one warp per tile. A tile is 32 lanes * 16 rounds of one 16-byte access, counted in the wider of the two
// types of a transfer: 8 KiB. Small tensors take one tile each, so that eight of them share a block, and large ones
// many, all alike, so that no block has more to do than another. The table has one entry per tensor and not per tile,
// hence stays small; a warp finds its tensor by a search in `first_tiles` (32 pivots per step, three steps for 32,768).
constexpr uint32_t kWarpLanes = 32;
constexpr uint32_t kRounds = 16;
constexpr uint32_t kAccessBytes = 16;
constexpr uint32_t kTileBytes = kWarpLanes * kRounds * kAccessBytes;
constexpr uint32_t kWarpsPerBlock = 8;

constexpr uint32_t tile_elements(uint32_t widest_element) { return kTileBytes / widest_element; }

// n / divisor for n < 2^31 by one multiplication (Granlund and Montgomery, 1994).
struct Divider {
  uint32_t divisor = 1;
  uint32_t multiplier = 0;
  uint32_t shift = 0;
};

// The dimensions of a tensor that is not contiguous, merged where strides allow it; the last one varies fastest.
constexpr int kMaxDims = 8;
struct Layout {
  int32_t dims = 0;
  Divider sizes[kMaxDims];
  int64_t strides[kMaxDims] = {};  // in elements
};

// A run of logical elements of one tensor.
struct alignas(16) Piece {
  uint64_t tensor = 0;  // address of the tensor's (or, when contiguous, the run's) first element; 0: absent
  uint64_t buffer = 0;  // where the run begins in the buffer, in bytes
  uint64_t count = 0;   // elements
  uint32_t begin = 0;   // first logical element; 0 when contiguous
  uint32_t layout = 0;  // 1 + index into the layouts; 0: contiguous
};
static_assert(sizeof(Piece) == 32, "read by two 16-byte accesses");

// A table is one block of memory: uint32_t first_tiles[pieces + 1], then, 16-byte aligned, Piece[pieces], Layout[].
constexpr uint64_t pieces_offset(uint32_t pieces) { return (uint64_t{pieces} + 1 + 3) / 4 * 16; }
constexpr uint64_t layouts_offset(uint32_t pieces) { return pieces_offset(pieces) + uint64_t{pieces} * sizeof(Piece); }

// A segment of buffers that Adasum treats as one vector. Its dot products are made of one partial sum per block of the
// grid that works on it.
struct Span {
  uint64_t begin = 0;       // first element in the buffers
  uint64_t count = 0;       // elements
  uint32_t first_slot = 0;  // of its partial sums
  uint32_t slots = 0;
};
static_assert(sizeof(Span) % 8 == 0);

// A table of spans: uint32_t first_tiles[spans + 1], then, 16-byte aligned, Span[spans].
// Note [Tiles of a dot product] A tile here is two of the others: its reduction costs as much as some loads.
constexpr uint32_t kDotRounds = 2 * kRounds;

}  // namespace fusewire::cuda
