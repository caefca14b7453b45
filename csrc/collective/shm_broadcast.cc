// The root packs a chunk into its slot, everybody else copies it home; up to four chunks are in flight.
#include <algorithm>

#include "collective/shm_context.h"

namespace fusewire {

void shm_broadcast(ShmContext& context, int root, size_t chunk_bytes) {
  BucketCursor& cursor = context.cursor;
  const auto step = std::max<int64_t>(1, static_cast<int64_t>(chunk_bytes / cursor.wire_bytes()));
  for (int64_t begin = 0; begin < cursor.elements(); begin += step) {
    const int64_t end = std::min(begin + step, cursor.elements());
    const int64_t chunk = ++context.chunk;
    std::byte* slot = context.region.slot(root, chunk);
    const auto trace = context.watch.step(context.rank == root ? ChunkStep::kPack : ChunkStep::kUnpack, begin, end);
    if (context.rank == root) {
      context.waiter.wait_all(ShmStage::kCopied, chunk - kShmBuffers);  // Note [Slot reuse]
      cursor.gather(begin, end, slot);
      context.waiter.note(ShmStage::kReduced, chunk);
      context.waiter.note(ShmStage::kCopied, chunk);
      context.waiter.publish(ShmStage::kPacked, chunk);
      cursor.scatter_elsewhere(slot, begin, end);
    } else {
      context.waiter.wait_for(root, ShmStage::kPacked, chunk);
      cursor.scatter(slot, begin, end);
      context.waiter.note(ShmStage::kPacked, chunk);
      context.waiter.note(ShmStage::kReduced, chunk);
      context.waiter.publish(ShmStage::kCopied, chunk);
    }
  }
}

}  // namespace fusewire
