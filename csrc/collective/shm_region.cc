#include "collective/shm_region.h"

#include "collective/shm.h"

namespace fusewire {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kSliceAlignment = 64;

constexpr size_t align_up(size_t value, size_t alignment) { return (value + alignment - 1) / alignment * alignment; }

size_t slots_offset(int size) {
  return align_up(sizeof(ShmHeader) + static_cast<size_t>(size) * (sizeof(ShmProgress) + sizeof(ShmSleeper)), kPage);
}

constexpr size_t kRankSlots = static_cast<size_t>(kShmBuffers) * kShmMaxChunk;

}  // namespace

size_t ShmRegion::bytes(int size) { return slots_offset(size) + static_cast<size_t>(size) * kRankSlots; }

int64_t ShmRegion::slice_elements(int64_t count, int size, size_t element_bytes) {
  const size_t share = static_cast<size_t>((count + size - 1) / size);
  return static_cast<int64_t>(align_up(share, kSliceAlignment / element_bytes));
}

ShmProgress& ShmRegion::progress(int rank) const {
  return reinterpret_cast<ShmProgress*>(base_ + sizeof(ShmHeader))[rank];
}

ShmSleeper& ShmRegion::sleeper(int rank) const {
  return reinterpret_cast<ShmSleeper*>(base_ + sizeof(ShmHeader) +
                                       static_cast<size_t>(size_) * sizeof(ShmProgress))[rank];
}

std::byte* ShmRegion::slot(int rank, int64_t chunk) const {
  return base_ + slots_offset(size_) + static_cast<size_t>(rank) * kRankSlots +
         static_cast<size_t>(chunk % kShmBuffers) * kShmMaxChunk;
}

size_t shm_region_bytes(int size) { return ShmRegion::bytes(size); }

}  // namespace fusewire
