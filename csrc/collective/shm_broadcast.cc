// The root packs a chunk into its slot, everybody else copies it home; up to four chunks are in flight. Medium sizes
// are read from where the root has them instead (shm_direct.cc Note [Direct exchange]).
#include <algorithm>
#include <utility>

#include "collective/shm_context.h"
#include "collective/shm_exchange.h"

namespace fusewire {

namespace {

// As an exchange in which only the root's row is not empty.
bool broadcast_directly(ShmContext& context, int root) {
  BucketCursor& cursor = context.cursor;
  const size_t parts = cursor.entries();
  for (BucketCursor& row : context.rows) row.start({cursor.wire(), cursor.wire()}, 0, 0);
  std::swap(context.rows[static_cast<size_t>(root)], cursor);
  if (shm_exchange_directly(context, context.rows[static_cast<size_t>(context.rank)], parts)) return true;
  std::swap(context.rows[static_cast<size_t>(root)], cursor);
  return false;
}

}  // namespace

void shm_broadcast(ShmContext& context, int root) {
  BucketCursor& cursor = context.cursor;
  const size_t bytes = static_cast<size_t>(cursor.elements()) * cursor.wire_bytes();
  if (context.size() > 1 && context.geometry.broadcast_directly(bytes, cursor.entries()) &&
      broadcast_directly(context, root)) {
    return;
  }
  const size_t chunk_bytes = context.geometry.for_copying(bytes);
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
