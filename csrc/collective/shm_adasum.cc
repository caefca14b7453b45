// Adasum (adasum.h): measures, in fp64, how every tensor's vectors lie to each other, and combines them with what
// follows from that. The second pass is the allreduce with another kernel. What is small is packed once and done by
// every rank itself.
#include <algorithm>
#include <vector>

#include "collective/adasum_measure.h"
#include "collective/shm_context.h"
#include "collective/shm_reduce.h"
#include "common/error.h"

namespace fusewire {
namespace {

// Note [Measuring pipeline]
// In step i a rank packs the blocks of chunk i that others own, measures its own of chunk i-1, and adds all measures of
// chunk i-2: the stages of an allreduce, with a block's measures in place of its results. They lie in the second half
// of the slot of the rank that owns the block, so chunks use only the first half.
class MeasuringPipeline {
 public:
  MeasuringPipeline(ShmContext& context, const std::vector<AdasumBlock>& blocks, AdasumMeasure& measure,
                    size_t chunk_bytes)
      : context_(context), blocks_(blocks), measure_(measure), first_(context.chunk + 1) {
    const auto most_elements = static_cast<int64_t>(std::min(chunk_bytes, kHalf) / context.cursor.wire_bytes());
    const size_t most_blocks = kHalf / (measure.values() * sizeof(double));
    if (most_blocks == 0) throw Error(ErrorCode::kCollective, "too many ranks for Adasum through shared memory");
    for (size_t i = 0; i < blocks.size(); ++i) {
      const bool fits = !chunks_.empty() && i - chunks_.back().first < most_blocks &&
                        blocks[i].end - blocks[chunks_.back().first].begin <= most_elements;
      if (!fits) chunks_.push_back({i, i});
      chunks_.back().last = i + 1;
    }
  }

  void run() {
    const size_t chunks = chunks_.size();
    for (size_t step = 0; step < chunks + 2; ++step) {
      if (step < chunks) pack(step);
      if (step >= 1 && step - 1 < chunks) measure(step - 1);
      if (step >= 2) add(step - 2);
    }
    context_.chunk += static_cast<int64_t>(chunks);
  }

 private:
  static constexpr size_t kHalf = kShmMaxChunk / 2;

  struct Chunk {
    size_t first;  // block
    size_t last;
  };

  int64_t number(size_t index) const { return first_ + static_cast<int64_t>(index); }
  std::byte* slot(int rank, size_t index) const { return context_.region.slot(rank, number(index)); }
  int64_t begin(const Chunk& chunk) const { return blocks_[chunk.first].begin; }
  int64_t end(const Chunk& chunk) const { return blocks_[chunk.last - 1].end; }
  size_t offset(const Chunk& chunk, const AdasumBlock& block) const {
    return static_cast<size_t>(block.begin - begin(chunk)) * context_.cursor.wire_bytes();
  }
  int owner(const Chunk& chunk, const AdasumBlock& block) const {
    const int64_t elements = end(chunk) - begin(chunk);
    return static_cast<int>((block.begin - begin(chunk)) * context_.size() / elements);
  }
  double* results(const Chunk& chunk, size_t index, size_t block) const {
    return reinterpret_cast<double*>(slot(owner(chunk, blocks_[block]), index) + kHalf) +
           (block - chunk.first) * measure_.values();
  }

  void pack(size_t index) {
    const Chunk& chunk = chunks_[index];
    const auto step = context_.watch.step(ChunkStep::kPack, begin(chunk), end(chunk));
    context_.waiter.wait_all(ShmStage::kCopied, number(index) - kShmBuffers);  // Note [Slot reuse]
    for (size_t b = chunk.first; b < chunk.last; ++b) {
      const AdasumBlock& block = blocks_[b];
      if (owner(chunk, block) == context_.rank) continue;
      context_.cursor.gather(block.begin, block.end, slot(context_.rank, index) + offset(chunk, block));
    }
    context_.waiter.publish(ShmStage::kPacked, number(index));
  }

  void measure(size_t index) {
    const Chunk& chunk = chunks_[index];
    const auto step = context_.watch.step(ChunkStep::kReduce, begin(chunk), end(chunk));
    context_.waiter.wait_all(ShmStage::kPacked, number(index));
    for (size_t b = chunk.first; b < chunk.last; ++b) {
      const AdasumBlock& block = blocks_[b];
      if (owner(chunk, block) != context_.rank) continue;
      for (int rank = 0; rank < context_.size(); ++rank) {
        context_.sources[static_cast<size_t>(rank)] = slot(rank, index) + offset(chunk, block);
      }
      context_.sources[static_cast<size_t>(context_.rank)] =
          context_.cursor.in_order(block.begin, block.end, slot(context_.rank, index) + offset(chunk, block));
      measure_.compute(block, context_.sources.data(), results(chunk, index, b));
    }
    context_.waiter.publish(ShmStage::kReduced, number(index));
  }

  void add(size_t index) {
    const Chunk& chunk = chunks_[index];
    const auto step = context_.watch.step(ChunkStep::kReduce, begin(chunk), end(chunk));
    context_.waiter.wait_all(ShmStage::kReduced, number(index));
    for (size_t b = chunk.first; b < chunk.last; ++b) measure_.add(blocks_[b], results(chunk, index, b));
    context_.waiter.publish(ShmStage::kCopied, number(index));
  }

  ShmContext& context_;
  const std::vector<AdasumBlock>& blocks_;
  AdasumMeasure& measure_;
  int64_t first_;  // number of the first chunk
  std::vector<Chunk> chunks_;
};

// context.bases are all ranks' rows, whole; every rank measures everything.
void measure_here(ShmContext& context, const std::vector<AdasumBlock>& blocks, AdasumMeasure& measure) {
  std::vector<double> results(measure.values());
  for (const AdasumBlock& block : blocks) {
    for (size_t rank = 0; rank < context.bases.size(); ++rank) {
      context.sources[rank] = context.bases[rank] + static_cast<size_t>(block.begin) * context.cursor.wire_bytes();
    }
    measure.compute(block, context.sources.data(), results.data());
    measure.add(block, results.data());
  }
}

}  // namespace

void shm_adasum_once(ShmContext& context, double factor) {
  BucketCursor& cursor = context.cursor;
  const int64_t chunk = ++context.chunk;
  {
    const auto step = context.watch.step(ChunkStep::kPack);
    context.waiter.wait_all(ShmStage::kCopied, chunk - kShmBuffers);  // Note [Slot reuse]
    cursor.gather(0, cursor.elements(), context.region.slot(context.rank, chunk));
    context.waiter.publish(ShmStage::kPacked, chunk);
  }

  const auto step = context.watch.step(ChunkStep::kReduce);
  const std::vector<AdasumBlock> blocks = adasum_blocks(cursor);
  for (int rank = 0; rank < context.size(); ++rank) {
    context.bases[static_cast<size_t>(rank)] = context.region.slot(rank, chunk);
  }
  context.scratch.resize(static_cast<size_t>(cursor.elements()) * cursor.wire_bytes());
  context.waiter.wait_all(ShmStage::kPacked, chunk);
  const AdasumCombiner combiner(context.cursor, context.size(), factor,
                                [&](AdasumMeasure& measure) { measure_here(context, blocks, measure); });
  const Reduction reduction{ReduceOp::kAdasum, {}, &combiner.found()};
  shm_reduce_home(context, cursor, reduction, 0, cursor.elements(), context.scratch.data(), false);

  context.waiter.note(ShmStage::kReduced, chunk);
  context.waiter.publish(ShmStage::kCopied, chunk);
}

void shm_adasum_sliced(ShmContext& context, double factor, size_t chunk_bytes) {
  const std::vector<AdasumBlock> blocks = adasum_blocks(context.cursor);
  const AdasumCombiner combiner(context.cursor, context.size(), factor, [&](AdasumMeasure& measure) {
    MeasuringPipeline(context, blocks, measure, chunk_bytes).run();
  });
  shm_allreduce_sliced(context, {ReduceOp::kAdasum, {}, &combiner.found()}, chunk_bytes);
}

}  // namespace fusewire
