// Adasum (adasum.h): measures, in fp64, how every tensor's vectors lie to each other, and combines them with what
// follows from that. The second pass is the allreduce with another kernel. What is small is packed once and done by
// every rank itself.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "collective/adasum.h"
#include "collective/shm_context.h"
#include "collective/shm_reduce.h"
#include "common/error.h"

namespace fusewire {
namespace {

// Note [Blocks]
// The bits of a sum depend on how it is cut, and how a tensor lies in chunks and slices depends on what it was fused
// with. So tensors are cut into blocks of fixed size, counted from their own beginning; one rank measures a block as a
// whole, and every rank adds the blocks' measures in their order, carrying rounding errors along. The result depends on
// nothing but the tensor, and is the same on every rank because all add the same numbers.
constexpr int64_t kBlockElements = 4096;

struct Block {
  int64_t begin;  // in the row
  int64_t end;
  size_t entry;
};

std::vector<Block> make_blocks(const BucketCursor& cursor) {
  std::vector<Block> blocks;
  for (size_t entry = 0; entry < cursor.entries(); ++entry) {
    const auto [begin, end] = cursor.entry(entry);
    for (int64_t at = begin; at < end; at += kBlockElements) {
      blocks.push_back({at, std::min(at + kBlockElements, end), entry});
    }
  }
  return blocks;
}

// What is measured: the dot products of all ranks' vectors, or each one's largest absolute value.
class Measure {
 public:
  enum class What { kDots, kPeaks };

  Measure(What what, ShmContext& context, const std::vector<double>& scales)
      : what_(what), context_(context), scales_(scales), n_(static_cast<size_t>(context.size())) {
    reset();
  }

  void reset() {
    totals_.assign(context_.cursor.entries() * values(), 0.0);
    lost_.assign(totals_.size(), 0.0);
  }

  size_t values() const { return what_ == What::kDots ? n_ * (n_ + 1) / 2 : n_; }

  // context.sources are the block's elements on all ranks.
  void compute(const Block& block, double* results) const {
    const auto count = static_cast<size_t>(block.end - block.begin);
    if (what_ == What::kDots) {
      cpu_kernels().dots({.sources = context_.sources.data(),
                          .scales = scales_.data() + block.entry * n_,
                          .source_count = context_.size(),
                          .count = count,
                          .dtype = context_.cursor.wire(),
                          .dots = results});
      return;
    }
    for (size_t rank = 0; rank < n_; ++rank) results[rank] = peak(context_.sources[rank], count);
  }

  void add(const Block& block, const double* results) {
    for (size_t i = 0; i < values(); ++i) {
      double& total = totals_[block.entry * values() + i];
      double& lost = lost_[block.entry * values() + i];
      if (what_ == What::kPeaks) {
        total = std::max(total, results[i]);
        continue;
      }
      const double sum = total + results[i];
      lost += std::abs(total) >= std::abs(results[i]) ? (total - sum) + results[i] : (results[i] - sum) + total;
      total = sum;
    }
  }

  std::vector<double> of(size_t entry) const {
    std::vector<double> all(values());
    for (size_t i = 0; i < all.size(); ++i) {
      all[i] = totals_[entry * all.size() + i];
      if (std::isfinite(all[i])) all[i] += lost_[entry * all.size() + i];
    }
    return all;
  }

 private:
  static double peak(const void* source, size_t count) {  // of fp64
    double largest = 0;
    for (size_t i = 0; i < count; ++i) {
      double x;
      std::memcpy(&x, static_cast<const std::byte*>(source) + i * sizeof(x), sizeof(x));
      largest = std::max(largest, std::abs(x));
    }
    return largest;
  }

  What what_;
  ShmContext& context_;
  const std::vector<double>& scales_;
  size_t n_;
  std::vector<double> totals_;  // [entry][value]
  std::vector<double> lost_;    // what additions rounded away
};

// Note [Measuring pipeline]
// In step i a rank packs the blocks of chunk i that others own, measures its own of chunk i-1, and adds all measures of
// chunk i-2: the stages of an allreduce, with a block's measures in place of its results. They lie in the second half
// of the slot of the rank that owns the block, so chunks use only the first half.
class MeasuringPipeline {
 public:
  MeasuringPipeline(ShmContext& context, const std::vector<Block>& blocks, Measure& measure, size_t chunk_bytes)
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
  size_t offset(const Chunk& chunk, const Block& block) const {
    return static_cast<size_t>(block.begin - begin(chunk)) * context_.cursor.wire_bytes();
  }
  int owner(const Chunk& chunk, const Block& block) const {
    const int64_t elements = blocks_[chunk.last - 1].end - begin(chunk);
    return static_cast<int>((block.begin - begin(chunk)) * context_.size() / elements);
  }
  double* results(const Chunk& chunk, size_t index, size_t block) const {
    return reinterpret_cast<double*>(slot(owner(chunk, blocks_[block]), index) + kHalf) +
           (block - chunk.first) * measure_.values();
  }

  void pack(size_t index) {
    const Chunk& chunk = chunks_[index];
    context_.waiter.wait_all(ShmStage::kCopied, number(index) - kShmBuffers);  // Note [Slot reuse]
    for (size_t b = chunk.first; b < chunk.last; ++b) {
      const Block& block = blocks_[b];
      if (owner(chunk, block) == context_.rank) continue;
      context_.cursor.gather(block.begin, block.end, slot(context_.rank, index) + offset(chunk, block));
    }
    context_.waiter.publish(ShmStage::kPacked, number(index));
  }

  void measure(size_t index) {
    const Chunk& chunk = chunks_[index];
    context_.waiter.wait_all(ShmStage::kPacked, number(index));
    for (size_t b = chunk.first; b < chunk.last; ++b) {
      const Block& block = blocks_[b];
      if (owner(chunk, block) != context_.rank) continue;
      for (int rank = 0; rank < context_.size(); ++rank) {
        context_.sources[static_cast<size_t>(rank)] = slot(rank, index) + offset(chunk, block);
      }
      context_.sources[static_cast<size_t>(context_.rank)] =
          context_.cursor.in_order(block.begin, block.end, slot(context_.rank, index) + offset(chunk, block));
      measure_.compute(block, results(chunk, index, b));
    }
    context_.waiter.publish(ShmStage::kReduced, number(index));
  }

  void add(size_t index) {
    const Chunk& chunk = chunks_[index];
    context_.waiter.wait_all(ShmStage::kReduced, number(index));
    for (size_t b = chunk.first; b < chunk.last; ++b) measure_.add(blocks_[b], results(chunk, index, b));
    context_.waiter.publish(ShmStage::kCopied, number(index));
  }

  ShmContext& context_;
  const std::vector<Block>& blocks_;
  Measure& measure_;
  int64_t first_;  // number of the first chunk
  std::vector<Chunk> chunks_;
};

// context.bases are all ranks' rows, whole; every rank measures everything.
void measure_here(ShmContext& context, const std::vector<Block>& blocks, Measure& measure) {
  std::vector<double> results(measure.values());
  for (const Block& block : blocks) {
    for (size_t rank = 0; rank < context.bases.size(); ++rank) {
      context.sources[rank] = context.bases[rank] + static_cast<size_t>(block.begin) * context.cursor.wire_bytes();
    }
    measure.compute(block, results.data());
    measure.add(block, results.data());
  }
}

// Note [Scales of fp64]
// Squares of fp64 values can leave the range of fp64. Where the square of some rank's vector comes near that, the
// tensor's vectors are measured once more, each scaled by a power of two that brings its largest element near 1. (A
// zero vector looks like one that vanished; it takes the smallest of the others' scales.) Powers of two are exact, so
// that it makes no difference otherwise. The squares of other types' values are far inside the range.
constexpr double kSmallestSquare = 0x1p-600;
constexpr double kLargestSquare = 0x1p600;
constexpr int kLargestExponent = 1000;

class Combiner {
 public:
  template <typename Pass>
  Combiner(ShmContext& context, double factor, const Pass& pass)
      : context_(context), n_(static_cast<size_t>(context.size())), entries_(context.cursor.entries()) {
    found_.scales.assign(entries_ * n_, 1.0);
    exponents_.assign(entries_ * n_, 0);
    Measure dots(Measure::What::kDots, context, found_.scales);
    pass(dots);
    if (context.cursor.wire() == DataType::kFloat64 && leaves_range(dots)) {
      Measure peaks(Measure::What::kPeaks, context, found_.scales);
      pass(peaks);
      rescale(dots, peaks);
      dots.reset();
      pass(dots);
    }
    combine(dots, factor);
  }

  const Combinations& found() const { return found_; }

 private:
  bool leaves_range(const std::vector<double>& dots) const {
    size_t square = 0;  // of rank 0, 1, ...
    for (size_t rank = 0; rank < n_; square += n_ - rank, ++rank) {
      if (!(dots[square] >= kSmallestSquare && dots[square] <= kLargestSquare)) return true;
    }
    return false;
  }

  bool leaves_range(const Measure& dots) const {
    for (size_t entry = 0; entry < entries_; ++entry) {
      if (leaves_range(dots.of(entry))) return true;
    }
    return false;
  }

  void rescale(const Measure& dots, const Measure& peaks) {
    for (size_t entry = 0; entry < entries_; ++entry) {
      if (!leaves_range(dots.of(entry))) continue;
      int* const exponents = exponents_.data() + entry * n_;
      const std::vector<double> largest = peaks.of(entry);
      int smallest = kLargestExponent;
      for (size_t rank = 0; rank < n_; ++rank) {
        exponents[rank] = kLargestExponent;
        if (std::isfinite(largest[rank])) std::frexp(largest[rank], &exponents[rank]);
        exponents[rank] = std::clamp(exponents[rank], -kLargestExponent, kLargestExponent);
        if (largest[rank] > 0) smallest = std::min(smallest, exponents[rank]);
      }
      for (size_t rank = 0; rank < n_; ++rank) {
        if (largest[rank] == 0) exponents[rank] = smallest;
        found_.scales[entry * n_ + rank] = std::ldexp(1.0, -exponents[rank]);
      }
    }
  }

  void combine(const Measure& dots, double factor) {
    found_.coefficients.reserve(entries_ * n_);
    for (size_t entry = 0; entry < entries_; ++entry) {
      const std::vector<int> exponents(exponents_.begin() + static_cast<ptrdiff_t>(entry * n_),
                                       exponents_.begin() + static_cast<ptrdiff_t>((entry + 1) * n_));
      const AdasumCombination combination = adasum_combination(dots.of(entry), exponents);
      for (const double coefficient : combination.coefficients) found_.coefficients.push_back(coefficient * factor);
      found_.factors.push_back(std::ldexp(1.0, combination.exponent));
    }
  }

  ShmContext& context_;
  size_t n_;
  size_t entries_;
  std::vector<int> exponents_;  // [entry][rank]: its scale is 2^-exponent
  Combinations found_;
};

}  // namespace

void shm_adasum_once(ShmContext& context, double factor) {
  BucketCursor& cursor = context.cursor;
  const int64_t chunk = ++context.chunk;
  context.waiter.wait_all(ShmStage::kCopied, chunk - kShmBuffers);  // Note [Slot reuse]
  cursor.gather(0, cursor.elements(), context.region.slot(context.rank, chunk));
  context.waiter.publish(ShmStage::kPacked, chunk);

  const std::vector<Block> blocks = make_blocks(cursor);
  for (int rank = 0; rank < context.size(); ++rank) {
    context.bases[static_cast<size_t>(rank)] = context.region.slot(rank, chunk);
  }
  context.scratch.resize(static_cast<size_t>(cursor.elements()) * cursor.wire_bytes());
  context.waiter.wait_all(ShmStage::kPacked, chunk);
  const Combiner combiner(context, factor, [&](Measure& measure) { measure_here(context, blocks, measure); });
  const Reduction reduction{ReduceOp::kAdasum, {}, &combiner.found()};
  shm_reduce_home(context, cursor, reduction, 0, cursor.elements(), context.scratch.data(), false);

  context.waiter.note(ShmStage::kReduced, chunk);
  context.waiter.publish(ShmStage::kCopied, chunk);
}

void shm_adasum_sliced(ShmContext& context, double factor, size_t chunk_bytes) {
  const std::vector<Block> blocks = make_blocks(context.cursor);
  const Combiner combiner(context, factor,
                          [&](Measure& measure) { MeasuringPipeline(context, blocks, measure, chunk_bytes).run(); });
  shm_allreduce_sliced(context, {ReduceOp::kAdasum, {}, &combiner.found()}, chunk_bytes);
}

}  // namespace fusewire
