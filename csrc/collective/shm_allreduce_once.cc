// Small buckets: one synchronisation. Every rank reads every contribution, so it pays while size * bytes is small.
#include "collective/shm_context.h"
#include "collective/shm_reduce.h"

namespace fusewire {

void shm_allreduce_once(ShmContext& context, const Reduction& reduction) {
  BucketCursor& cursor = context.cursor;
  const int64_t chunk = ++context.chunk;
  const int64_t elements = cursor.elements();

  {
    const auto step = context.watch.step(ChunkStep::kPack);
    context.waiter.wait_all(ShmStage::kCopied, chunk - kShmBuffers);  // Note [Slot reuse]
    cursor.gather(0, elements, context.region.slot(context.rank, chunk));
    context.waiter.publish(ShmStage::kPacked, chunk);
  }
  const auto step = context.watch.step(ChunkStep::kReduce);

  for (int rank = 0; rank < context.size(); ++rank) {
    context.bases[static_cast<size_t>(rank)] = context.region.slot(rank, chunk);
  }
  context.scratch.resize(static_cast<size_t>(elements) * cursor.wire_bytes());
  context.waiter.wait_all(ShmStage::kPacked, chunk);
  shm_reduce_home(context, cursor, reduction, 0, elements, context.scratch.data(), false);

  context.waiter.note(ShmStage::kReduced, chunk);
  context.waiter.publish(ShmStage::kCopied, chunk);
}

}  // namespace fusewire
