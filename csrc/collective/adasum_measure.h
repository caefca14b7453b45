// How Adasum's measures are taken and added up, and what follows from them: the part of it that is the same on every
// data plane (adasum.h has the rule). A plane says who measures what, and how the measures get about.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

#include "collective/bucket_cursor.h"
#include "collective/reduction.h"
#include "kernels/kernels.h"

namespace fusewire {

// Note [Blocks]
// The bits of a sum depend on how it is cut, and how a tensor lies in chunks and slices depends on what it was fused
// with. So tensors are cut into blocks of fixed size, counted from their own beginning; one rank measures a block as a
// whole, and every rank adds the blocks' measures in their order, carrying rounding errors along. The result depends on
// nothing but the tensor, and is the same on every rank because all add the same numbers.
struct AdasumBlock {
  int64_t begin;  // in the row
  int64_t end;
  size_t entry;
};
std::vector<AdasumBlock> adasum_blocks(const BucketCursor& cursor);

// What is measured: the dot products of all ranks' vectors, or each one's largest absolute value.
class AdasumMeasure {
 public:
  enum class What { kDots, kPeaks };

  // `scales`: [entry][source], of fp64.
  AdasumMeasure(What what, const BucketCursor& cursor, int sources, const std::vector<double>& scales);

  void reset();
  size_t values() const { return what_ == What::kDots ? n_ * (n_ + 1) / 2 : n_; }  // of a block

  // `sources` are the block's elements on all ranks.
  void compute(const AdasumBlock& block, const void* const* sources, double* results) const;
  void add(const AdasumBlock& block, const double* results);
  std::vector<double> of(size_t entry) const;

 private:
  What what_;
  const BucketCursor& cursor_;
  const std::vector<double>& scales_;
  size_t n_;
  std::vector<double> totals_;  // [entry][value]
  std::vector<double> lost_;    // what additions rounded away
};

// Note [Scales of fp64]
// Squares of fp64 values can leave the range of fp64. Where the square of some rank's vector comes near that, the
// tensor's vectors are measured once more, each scaled by a power of two that brings its largest element near 1. (A
// zero vector looks like one that vanished; it takes the smallest of the others' scales.) Powers of two are exact, so
// that it makes no difference otherwise. The squares of other types' values are far inside the range.
class AdasumCombiner {
 public:
  // pass(measure) adds the measures of all blocks of `cursor`'s row, in order; it is called once or three times.
  AdasumCombiner(const BucketCursor& cursor, int sources, double factor,
                 const std::function<void(AdasumMeasure&)>& pass);

  const Combinations& found() const { return found_; }

 private:
  bool leaves_range(const std::vector<double>& dots) const;
  bool leaves_range(const AdasumMeasure& dots) const;
  void rescale(const AdasumMeasure& dots, const AdasumMeasure& peaks);
  void combine(const AdasumMeasure& dots, double factor);

  size_t n_;
  size_t entries_;
  std::vector<int> exponents_;  // [entry][rank]: its scale is 2^-exponent
  Combinations found_;
};

}  // namespace fusewire
