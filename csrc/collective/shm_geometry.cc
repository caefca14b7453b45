#include "collective/shm_geometry.h"

#include <algorithm>
#include <array>
#include <cstdint>

#include "collective/shm_region.h"

namespace fusewire {

// Buckets of up to `bytes` go through chunks of `chunk` bytes; 0 means all at once.
struct ShmGeometry::Row {
  size_t bytes;
  size_t chunk;
};

namespace {

constexpr size_t kMinChunk = 1024;
constexpr size_t kMinSlice = 32 << 10;

template <typename Table>
size_t look_up(const Table& table, size_t bytes) {
  return std::find_if(table.begin(), table.end(), [&](const auto& row) { return bytes <= row.bytes; })->chunk;
}

}  // namespace

ShmGeometry::ShmGeometry(int size, size_t chunk_bytes, size_t direct_bytes, bool crowded)
    : size_(size), chunk_bytes_(chunk_bytes), direct_bytes_(direct_bytes), crowded_(crowded) {}

size_t ShmGeometry::clamp(size_t chunk) const {
  return std::min(std::max(chunk, kMinSlice * static_cast<size_t>(size_)), kShmMaxChunk);
}

// A chunk's slots and the user memory they come from should stay in a core's L2 cache, and a bucket should have a few
// chunks to overlap. Where ranks outnumber cores every hand-over is a context switch: fewer, larger chunks. With more
// ranks a chunk grows, so that what a rank owns of it stays worth a hand-over. A chunk size that the user asks for is
// kept, also by what goes at once.
size_t ShmGeometry::for_reduction(size_t bytes) const {
  constexpr std::array<Row, 3> kSpinning = {{{1 << 10, 0}, {128 << 10, 64 << 10}, {SIZE_MAX, 128 << 10}}};
  constexpr std::array<Row, 3> kCrowded = {{{16 << 10, 0}, {256 << 10, 256 << 10}, {SIZE_MAX, 256 << 10}}};
  const size_t chunk = look_up(crowded_ ? kCrowded : kSpinning, bytes);
  if (chunk_bytes_ != 0) return chunk == 0 && bytes <= chunk_bytes_ ? 0 : std::max(chunk_bytes_, kMinChunk);
  return chunk == 0 ? 0 : clamp(chunk);
}

// It saves four hand-overs and a second packing, and costs reading the others' parts of the bucket.
bool ShmGeometry::adasum_at_once(size_t bytes) const {
  constexpr size_t kSpinning = 32 << 10;
  constexpr size_t kCrowded = 128 << 10;
  if (chunk_bytes_ != 0) return bytes <= std::min(chunk_bytes_, kShmMaxChunk);
  return bytes * static_cast<size_t>(size_ - 1) <= (crowded_ ? kCrowded : kSpinning);
}

size_t ShmGeometry::for_copying(size_t bytes) const {
  constexpr std::array<Row, 2> kSpinning = {{{128 << 10, 64 << 10}, {SIZE_MAX, 128 << 10}}};
  constexpr std::array<Row, 1> kCrowded = {{{SIZE_MAX, 256 << 10}}};
  if (chunk_bytes_ != 0) return std::max(chunk_bytes_, kMinChunk);
  return clamp(crowded_ ? look_up(kCrowded, bytes) : look_up(kSpinning, bytes));
}

bool ShmGeometry::directly(size_t bytes, size_t parts, size_t largest) const {
  constexpr size_t kSmallest = 32 << 10;
  constexpr size_t kSmallPart = 16 << 10;
  if (direct_bytes_ != 0) return bytes >= direct_bytes_;
  return bytes >= kSmallest && bytes <= largest && bytes >= parts * kSmallPart;
}

bool ShmGeometry::directly(size_t bytes, size_t parts) const { return directly(bytes, parts, 4 << 20); }

// Packing and unpacking are different ranks' work here, so with several chunks they overlap.
bool ShmGeometry::broadcast_directly(size_t bytes, size_t parts) const { return directly(bytes, parts, 1 << 20); }

}  // namespace fusewire
