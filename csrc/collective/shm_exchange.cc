// The pipeline under allgather and alltoall: every rank packs what it gives into its slots, chunk by chunk, once, and
// whoever takes a part of the chunk copies it straight home. What a rank gives to itself never sees a slot.
#include "collective/shm_exchange.h"

#include <algorithm>

namespace fusewire {
namespace {

// Note [Exchange]
// In step i a rank packs chunk i of what it gives, copies as much of its own part, and takes home what chunk i-1 of
// every other rank holds for it. Chunk numbers run to the end of the longest row on all ranks. A rank does not wait for
// a chunk that holds nothing for it, nor for slots that it has nothing to put into: that it "has read" chunk i
// (kCopied) says that it will not look at it any more, and this is as true for a chunk it never looked at.
class Exchange {
 public:
  Exchange(ShmContext& context, int64_t chunk_elements)
      : context_(context), first_(context.chunk + 1), chunk_elements_(chunk_elements) {}

  void pack(int64_t index) {
    const auto step = context_.watch.step(ChunkStep::kPack);
    const int64_t number = first_ + index;
    BucketCursor& given = context_.rows[static_cast<size_t>(context_.rank)];
    if (given.overlaps(begin(index), end(index))) {
      context_.waiter.wait_all(ShmStage::kCopied, number - kShmBuffers);  // Note [Slot reuse]
      given.gather(begin(index), end(index), context_.region.slot(context_.rank, number));
    }
    context_.waiter.publish(ShmStage::kPacked, number);
  }

  void take(int64_t index) {
    const auto trace = context_.watch.step(ChunkStep::kUnpack);
    const int64_t number = first_ + index;
    if (context_.crowded) wait_for_all(index);
    for (int step = 1; step < context_.size(); ++step) {
      const int peer = (context_.rank + step) % context_.size();
      if (!row(peer).overlaps(begin(index), end(index))) continue;
      context_.waiter.wait_for(peer, ShmStage::kPacked, number);
      row(peer).scatter(context_.region.slot(peer, number), begin(index), end(index));
    }
    context_.waiter.note(ShmStage::kReduced, number);
    context_.waiter.publish(ShmStage::kCopied, number);
  }

 private:
  int64_t begin(int64_t index) const { return index * chunk_elements_; }
  int64_t end(int64_t index) const { return begin(index) + chunk_elements_; }
  BucketCursor& row(int rank) { return context_.rows[static_cast<size_t>(rank)]; }

  // Where a wait is a sleep, one for all peers.
  void wait_for_all(int64_t index) {
    for (int peer = 0; peer < context_.size(); ++peer) {
      if (peer == context_.rank || !row(peer).overlaps(begin(index), end(index))) continue;
      return context_.waiter.wait_all(ShmStage::kPacked, first_ + index);
    }
  }

  ShmContext& context_;
  int64_t first_;  // number of this bucket's first chunk
  int64_t chunk_elements_;
};

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

void shm_exchange(ShmContext& context, BucketCursor& own, int64_t longest, size_t most_parts) {
  const size_t bytes = static_cast<size_t>(longest) * own.wire_bytes();
  if (context.size() > 1 && context.geometry.directly(bytes, most_parts) &&
      shm_exchange_directly(context, own, most_parts)) {
    return;
  }
  const size_t chunk_bytes = context.geometry.for_copying(bytes);
  const auto chunk_elements = std::max<int64_t>(1, static_cast<int64_t>(chunk_bytes / own.wire_bytes()));
  const int64_t chunks = context.size() == 1 ? 0 : divide_up(longest, chunk_elements);
  const int64_t own_step = std::max(chunk_elements, divide_up(own.elements(), std::max<int64_t>(1, chunks)));
  Exchange exchange(context, chunk_elements);
  for (int64_t step = 0; step <= chunks; ++step) {
    if (step < chunks) exchange.pack(step);
    {
      const auto trace = context.watch.step(ChunkStep::kUnpack);
      own.copy_across(step * own_step, (step + 1) * own_step);  // an allgather's lies in the cache now
    }
    if (step > 0) exchange.take(step - 1);
  }
  context.chunk += chunks;
}

}  // namespace fusewire
