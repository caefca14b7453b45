#include "collective/part_counts.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "collective/bucket_cursor.h"
#include "common/error.h"
#include "kernels/kernels.h"

namespace fusewire {
namespace {

// The bytes between the first and the last element of a view, both included.
struct Extent {
  const std::byte* begin;
  const std::byte* end;
};

Extent extent(const TensorView& view) {
  const auto width = static_cast<int64_t>(size_of(view.dtype));
  int64_t low = 0;
  int64_t high = 0;
  for (size_t d = 0; d < view.sizes.size(); ++d) {
    const int64_t reach = (view.sizes[d] - 1) * view.strides[d];
    (reach < 0 ? low : high) += reach;
  }
  const auto* data = static_cast<const std::byte*>(view.data);
  return {data + low * width, data + (high + 1) * width};
}

bool overlap(const TensorView& a, const TensorView& b) {
  if (a.data == nullptr || b.data == nullptr || a.numel() == 0 || b.numel() == 0) return false;
  const Extent left = extent(a);
  const Extent right = extent(b);
  return left.begin < right.end && right.begin < left.end;
}

// Whether the output meets the input only where this rank's own part is, element on element: then every byte is read
// before it is written, in whatever order the rest comes. Never so for an alltoall, where the own part is not alone.
bool own_part_in_place(const Bucket& bucket, const Segment& segment, const PartCounts& counts, int rank) {
  if (bucket.kind == OpKind::kAlltoall) return false;
  if (!segment.input.is_contiguous() || !segment.output.is_contiguous()) return false;
  const auto width = static_cast<int64_t>(size_of(bucket.dtype));
  const auto* in = static_cast<const std::byte*>(segment.input.data) + counts.in_offset(rank, rank) * width;
  const auto* out = static_cast<const std::byte*>(segment.output.data) + counts.out_offset(rank, rank) * width;
  return in == out;
}

}  // namespace

PartCounts::PartCounts(const Bucket& bucket, const Segment& segment, int size, int rank)
    : counts_(segment.counts.data()),
      giver_step_(bucket.kind == OpKind::kAlltoall ? static_cast<size_t>(size) : (bucket.kind == OpKind::kAllgather)),
      taker_step_(bucket.kind != OpKind::kAllgather),
      size_(size) {
  const auto n = static_cast<size_t>(size);
  if (segment.counts.size() != (bucket.kind == OpKind::kAlltoall ? n * n : n)) {
    contradiction("a tensor has " + std::to_string(segment.counts.size()) + " counts");
  }
  if (std::any_of(segment.counts.begin(), segment.counts.end(), [](int64_t count) { return count < 0; })) {
    contradiction("a count is negative");
  }
  const int64_t given = bucket.kind == OpKind::kAllgather ? (*this)(rank, rank) : in_offset(rank, size);
  const int64_t taken = bucket.kind == OpKind::kReduceScatter ? (*this)(rank, rank) : out_offset(size, rank);
  if (segment.input.data != nullptr && segment.input.numel() != given) contradiction("an input is not of its counts");
  if (segment.output.data != nullptr && segment.output.numel() != taken) {
    contradiction("an output is not of its counts");
  }
}

int64_t PartCounts::in_offset(int giver, int taker) const {
  if (taker_step_ == 0) return 0;
  int64_t offset = 0;
  for (int earlier = 0; earlier < taker; ++earlier) offset += (*this)(giver, earlier);
  return offset;
}

int64_t PartCounts::out_offset(int giver, int taker) const {
  if (giver_step_ == 0) return 0;
  int64_t offset = 0;
  for (int earlier = 0; earlier < giver; ++earlier) offset += (*this)(earlier, taker);
  return offset;
}

std::vector<PartCounts> part_counts(const Bucket& bucket, int size, int rank) {
  std::vector<PartCounts> counts;
  counts.reserve(bucket.segments.size());
  for (const Segment& segment : bucket.segments) counts.emplace_back(bucket, segment, size, rank);
  return counts;
}

bool overwrites_input(const Bucket& bucket, const Segment& segment, int size, int rank) {
  return overlap(segment.input, segment.output) &&
         !own_part_in_place(bucket, segment, PartCounts(bucket, segment, size, rank), rank);
}

DetachedBucket::DetachedBucket(const Bucket& bucket, int size, int rank) : bucket_(bucket) {
  for (size_t i = 0; i < bucket.segments.size(); ++i) {
    const Segment& segment = bucket.segments[i];
    if (!overwrites_input(bucket, segment, size, rank)) continue;
    if (replaced_.segments.empty()) replaced_ = bucket;
    const int64_t count = segment.input.numel();
    copies_.emplace_back(static_cast<size_t>(count) * size_of(bucket.dtype));
    pack(segment.input, 0, count, bucket.dtype, 1.0, copies_.back().data());
    replaced_.segments[i].input = contiguous_view(copies_.back().data(), bucket.dtype, segment.input.sizes);
  }
}

}  // namespace fusewire
