// Every rank owns a part of each tensor's elements and reduces that, chunk by chunk, out of everybody's slots and its
// own input. The row of owner r is its parts of all tensors; a chunk carries a slice of every owner's row.
#include <algorithm>
#include <vector>

#include "collective/part_counts.h"
#include "collective/shm_reduce.h"

namespace fusewire {
namespace {

constexpr size_t kSliceAlignment = 64;

// In step i a rank packs the slices of chunk i that others own and reduces its own slice of chunk i-1.
class Pipeline {
 public:
  Pipeline(ShmContext& context, const Reduction& reduction, int64_t longest, size_t chunk_bytes)
      : context_(context),
        reduction_(reduction),
        first_(context.chunk + 1),
        slice_bytes_(std::max(chunk_bytes / static_cast<size_t>(context.size()) / kSliceAlignment, size_t{1}) *
                     kSliceAlignment),
        slice_(static_cast<int64_t>(slice_bytes_ / row(0).wire_bytes())),
        chunks_((longest + slice_ - 1) / slice_) {}

  void run() {
    for (int64_t step = 0; step <= chunks_; ++step) {
      if (step < chunks_) pack(step);
      if (step > 0) reduce(step - 1);
    }
    context_.chunk += chunks_;
  }

 private:
  BucketCursor& row(int owner) { return context_.rows[static_cast<size_t>(owner)]; }
  std::byte* slice_of(int owner, int rank, int64_t number) const {
    return context_.region.slot(rank, number) + static_cast<size_t>(owner) * slice_bytes_;
  }

  void pack(int64_t index) {
    const auto step = context_.watch.step(ChunkStep::kPack);
    const int64_t number = first_ + index;
    context_.waiter.wait_all(ShmStage::kCopied, number - kShmBuffers);  // Note [Slot reuse]
    for (int owner = 0; owner < context_.size(); ++owner) {
      std::byte* slice = slice_of(owner, context_.rank, number);
      if (owner == context_.rank) {
        row(owner).gather_staged(index * slice_, (index + 1) * slice_, slice);
      } else {
        row(owner).gather(index * slice_, (index + 1) * slice_, slice);
      }
    }
    context_.waiter.publish(ShmStage::kPacked, number);
  }

  void reduce(int64_t index) {
    const auto step = context_.watch.step(ChunkStep::kReduce);
    const int64_t number = first_ + index;
    BucketCursor& own = row(context_.rank);
    const int64_t begin = index * slice_;
    const int64_t end = std::min(begin + slice_, own.elements());
    if (begin < end) {
      for (int rank = 0; rank < context_.size(); ++rank) {
        context_.bases[static_cast<size_t>(rank)] = slice_of(context_.rank, rank, number);
      }
      context_.waiter.wait_all(ShmStage::kPacked, number);
      shm_reduce_home(context_, own, reduction_, begin, end, slice_of(context_.rank, context_.rank, number), false);
    }
    context_.waiter.note(ShmStage::kReduced, number);
    context_.waiter.publish(ShmStage::kCopied, number);
  }

  ShmContext& context_;
  const Reduction& reduction_;
  int64_t first_;  // number of this bucket's first chunk
  size_t slice_bytes_;
  int64_t slice_;  // elements
  int64_t chunks_;
};

}  // namespace

void shm_reduce_scatter(ShmContext& context, const Bucket& given, const Reduction& reduction,
                        const BucketCursor::Format& format) {
  const int size = context.size();
  const DetachedBucket detached(given, size, context.rank);
  const Bucket& bucket = detached.get();
  const std::vector<PartCounts> counts = part_counts(bucket, size, context.rank);
  int64_t longest = 0;
  for (int owner = 0; owner < size; ++owner) {
    int64_t length = 0;
    for (const PartCounts& count : counts) length += count(context.rank, owner);
    longest = std::max(longest, length);
    BucketCursor& row = context.rows[static_cast<size_t>(owner)];
    row.start(format, 0, static_cast<size_t>(length) * size_of(format.wire));
    for (size_t s = 0; s < bucket.segments.size(); ++s) {
      row.append(&bucket.segments[s].input, counts[s].in_offset(context.rank, owner),
                 owner == context.rank ? &bucket.segments[s].output : nullptr, 0, counts[s](context.rank, owner));
    }
  }
  const size_t bytes = static_cast<size_t>(longest * size) * size_of(format.wire);
  const size_t chunk = context.geometry.for_reduction(bytes);
  Pipeline(context, reduction, longest, chunk == 0 ? kShmMaxChunk : chunk).run();
}

}  // namespace fusewire
