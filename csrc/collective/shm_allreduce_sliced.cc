// Large buckets: a reduce-scatter and an allgather per chunk, over slots that stay in the cache. User memory is read
// once and written once; between ranks move only the slices that somebody else owns.
#include <algorithm>

#include "collective/shm_context.h"
#include "collective/shm_reduce.h"

namespace fusewire {
namespace {

// Note [Pipeline]
// In step i a rank packs chunk i, reduces its slice of chunk i-1 and copies home the slices of chunk i-2. So it always
// has done one more thing than its peers wait for, and waits itself only when a peer is a whole step behind. With four
// slots that holds for packing too: chunk i's slot was chunk i-4's, which a peer has left two steps ago.
class Pipeline {
 public:
  Pipeline(ShmContext& context, const Reduction& reduction, size_t chunk_bytes)
      : context_(context),
        reduction_(reduction),
        cursor_(context.cursor),
        first_(context.chunk + 1),
        chunk_elements_(std::max<int64_t>(1, static_cast<int64_t>(chunk_bytes / cursor_.wire_bytes()))),
        chunks_((cursor_.elements() + chunk_elements_ - 1) / chunk_elements_) {}

  void run() {
    for (int64_t step = 0; step < chunks_ + 2; ++step) {
      if (step < chunks_) pack(step);
      if (step >= 1 && step - 1 < chunks_) reduce(step - 1);
      if (step >= 2) copy(step - 2);
    }
    context_.chunk += chunks_;
  }

 private:
  struct Span {
    int64_t begin;
    int64_t end;
  };

  Span chunk_span(int64_t index) const {
    const int64_t begin = index * chunk_elements_;
    return {begin, std::min(begin + chunk_elements_, cursor_.elements())};
  }

  // What `rank` owns of chunk `index`; empty for the last ranks of a short chunk.
  Span slice(int64_t index, int rank) const {
    const auto [begin, end] = chunk_span(index);
    const int64_t share = ShmRegion::slice_elements(end - begin, context_.size(), cursor_.wire_bytes());
    return {std::min(begin + rank * share, end), std::min(begin + (rank + 1) * share, end)};
  }

  size_t bytes(int64_t elements) const { return static_cast<size_t>(elements) * cursor_.wire_bytes(); }

  void pack(int64_t index) {
    const int64_t number = first_ + index;
    const auto [begin, end] = chunk_span(index);
    const auto step = context_.watch.step(ChunkStep::kPack, begin, end);
    context_.waiter.wait_all(ShmStage::kCopied, number - kShmBuffers);  // Note [Slot reuse]
    std::byte* slot = context_.region.slot(context_.rank, number);
    const auto [own_begin, own_end] = slice(index, context_.rank);
    cursor_.gather(begin, own_begin, slot);
    cursor_.gather_staged(own_begin, own_end, slot + bytes(own_begin - begin));
    cursor_.gather(own_end, end, slot + bytes(own_end - begin));
    context_.waiter.publish(ShmStage::kPacked, number);
  }

  void reduce(int64_t index) {
    const int64_t number = first_ + index;
    const auto [begin, end] = slice(index, context_.rank);
    const auto step = context_.watch.step(ChunkStep::kReduce, begin, end);
    const size_t offset = bytes(begin - chunk_span(index).begin);
    for (int rank = 0; rank < context_.size(); ++rank) {
      context_.bases[static_cast<size_t>(rank)] = context_.region.slot(rank, number) + offset;
    }
    context_.waiter.wait_all(ShmStage::kPacked, number);
    std::byte* results = context_.region.slot(context_.region.result_home(context_.rank), number) + offset;
    shm_reduce_home(context_, cursor_, reduction_, begin, end, results, context_.size() > 1);
    context_.waiter.publish(ShmStage::kReduced, number);
  }

  void copy(int64_t index) {
    const int64_t number = first_ + index;
    const auto [chunk_begin, chunk_end] = chunk_span(index);
    const auto trace = context_.watch.step(ChunkStep::kUnpack, chunk_begin, chunk_end);
    // Where a wait is a sleep, one for all peers; where it is a spin, begin with whoever is ready.
    if (context_.crowded) context_.waiter.wait_all(ShmStage::kReduced, number);
    for (int step = 1; step < context_.size(); ++step) {
      const int peer = (context_.rank + step) % context_.size();
      context_.waiter.wait_for(peer, ShmStage::kReduced, number);
      const auto [begin, end] = slice(index, peer);
      const std::byte* slot = context_.region.slot(context_.region.result_home(peer), number);
      cursor_.scatter(slot + bytes(begin - chunk_begin), begin, end);
    }
    context_.waiter.publish(ShmStage::kCopied, number);
  }

  ShmContext& context_;
  const Reduction& reduction_;
  BucketCursor& cursor_;
  int64_t first_;  // number of this bucket's first chunk
  int64_t chunk_elements_;
  int64_t chunks_;
};

}  // namespace

void shm_allreduce_sliced(ShmContext& context, const Reduction& reduction, size_t chunk_bytes) {
  Pipeline(context, reduction, chunk_bytes).run();
}

}  // namespace fusewire
