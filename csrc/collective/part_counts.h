// Rows of the collectives in which ranks hold different parts of a tensor (backend.h Note [Counts]).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collective/backend.h"

namespace fusewire {

// The counts of one segment, as an n x n matrix: what member i gives to member j. Of an allgather every j receives the
// same, of a reduce-scatter every i gives the same.
class PartCounts {
 public:
  // Throws Error(kInternal) where the counts do not fit the kind, the set or the views.
  PartCounts(const Bucket& bucket, const Segment& segment, int size, int rank);

  int64_t operator()(int giver, int taker) const {
    return counts_[static_cast<size_t>(giver) * giver_step_ + static_cast<size_t>(taker) * taker_step_];
  }

  // Where in rank `giver`'s input the part for `taker` begins, and where in the taker's output it goes.
  int64_t in_offset(int giver, int taker) const;
  int64_t out_offset(int giver, int taker) const;

 private:
  const int64_t* counts_;
  size_t giver_step_;
  size_t taker_step_;
  int size_;
};

// One of every segment.
std::vector<PartCounts> part_counts(const Bucket& bucket, int size, int rank);

// Whether the output overlaps the input, and not just where this rank's own part goes: then results may overwrite what
// is still to be given.
bool overwrites_input(const Bucket& bucket, const Segment& segment, int size, int rank);

// The bucket as the rows are made from it: with inputs that its own outputs would overwrite too early replaced by
// copies.
class DetachedBucket {
 public:
  DetachedBucket(const Bucket& bucket, int size, int rank);
  const Bucket& get() const { return replaced_.segments.empty() ? bucket_ : replaced_; }

 private:
  const Bucket& bucket_;
  Bucket replaced_;
  std::vector<std::vector<std::byte>> copies_;
};

}  // namespace fusewire
