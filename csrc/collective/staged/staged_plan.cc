#include "collective/staged/staged_plan.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "collective/bucket_cursor.h"
#include "collective/part_counts.h"

namespace fusewire {
namespace {

constexpr size_t kAlignment = 16;         // of a tensor in a buffer: what the kernels are fast with
constexpr size_t kRegionAlignment = 256;  // of what a rank gets

size_t aligned(size_t bytes, size_t alignment) { return (bytes + alignment - 1) / alignment * alignment; }

bool same_elements(OpKind kind) { return kind == OpKind::kAllreduce || kind == OpKind::kBroadcast; }

bool same_place(const Segment& segment) {
  return segment.input.data == segment.output.data && segment.input.strides == segment.output.strides;
}

}  // namespace

StagedPlan::StagedPlan(const Bucket& bucket, int size, int rank, size_t chunk_bytes)
    : bucket_(bucket),
      size_(size),
      rank_(rank),
      wire_(reduces(bucket.kind) ? bucket.wire : bucket.dtype),
      width_(static_cast<int64_t>(size_of(wire_))),
      factor_(wire_ == bucket.dtype ? 1.0 : bucket.prescale),
      inner_(bucket),
      shared_(same_elements(bucket.kind)) {
  // Compression narrows when a tensor is packed, and there the prescale belongs (reduction.h).
  if (wire_ != bucket.dtype) inner_.prescale = 1.0;
  const bool whole = bucket.kind == OpKind::kAllreduce && bucket.op == ReduceOp::kAdasum;
  const auto most = static_cast<int64_t>(chunk_bytes);
  int64_t filled = 0;  // bytes of the open chunk: the same on all ranks
  int64_t elements = 0;
  for (const Segment& segment : bucket.segments) {
    if (segment.input.dtype != bucket.dtype || segment.output.dtype != bucket.dtype) {
      contradiction("a tensor has another dtype");
    }
    const Parts parts = parts_of(segment);
    const int64_t bytes = parts.elements * width_;
    if (bytes == 0) continue;
    const int64_t pieces = whole ? 1 : (bytes + most - 1) / most;
    if (pieces > 1 || filled + bytes > most) {
      close();
      filled = 0;
    }
    for (int64_t piece = 0; piece < pieces; ++piece) {
      first_ = elements + segment.input.numel() * piece / pieces;
      append(segment, parts, piece, pieces);
      if (pieces > 1) close();
    }
    if (pieces == 1) filled += bytes;
    elements += segment.input.numel();
  }
  close();
  if (elements != bucket.elements) contradiction("its element count is not the sum of its tensors'");
}

size_t StagedPlan::most_bytes() const {
  size_t most = 0;
  for (const StagedChunk& chunk : chunks_) most = std::max(most, chunk.bytes());
  return most;
}

StagedPlan::Parts StagedPlan::parts_of(const Segment& segment) const {
  Parts parts;
  if (shared_) {
    const int64_t count = segment.input.numel();
    if (count != segment.output.numel()) contradiction("input and output of a tensor differ in size");
    parts.in = parts.out = {{0, count}};
    parts.elements = count;
    return parts;
  }
  const PartCounts counts(bucket_, segment, size_, rank_);
  parts.counts = segment.counts;
  int64_t offset = 0;
  for (int taker = 0; taker < (bucket_.kind == OpKind::kAllgather ? 1 : size_); ++taker) {
    parts.in.push_back({offset, counts(rank_, taker)});
    offset += counts(rank_, taker);
  }
  if (bucket_.kind == OpKind::kReduceScatter) {
    parts.out = {{0, counts(rank_, rank_)}};
  } else {
    offset = 0;
    for (int giver = 0; giver < size_; ++giver) {
      parts.out.push_back({offset, counts(giver, rank_)});
      offset += counts(giver, rank_);
    }
  }
  if (bucket_.kind != OpKind::kAlltoall) {
    parts.elements = std::accumulate(parts.counts.begin(), parts.counts.end(), int64_t{0});
    return parts;
  }
  for (int rank = 0; rank < size_; ++rank) {
    int64_t given = 0;
    int64_t taken = 0;
    for (int other = 0; other < size_; ++other) {
      given += counts(rank, other);
      taken += counts(other, rank);
    }
    parts.elements = std::max({parts.elements, given, taken});
  }
  return parts;
}

// Where piece `piece` of a part begins. Aligned, so that all but the last pieces of a part are.
int64_t StagedPlan::cut(int64_t count, int64_t piece, int64_t pieces) const {
  if (piece == pieces) return count;
  const int64_t step = std::max<int64_t>(1, static_cast<int64_t>(kAlignment) / width_);
  return count * piece / pieces / step * step;
}

int64_t StagedPlan::count_of(const std::vector<Run>& runs, int64_t piece, int64_t pieces) const {
  int64_t sum = 0;
  for (const Run& run : runs) sum += cut(run.count, piece + 1, pieces) - cut(run.count, piece, pieces);
  return sum;
}

// The pieces of all parts one after the other, those that follow one another in the tensor as one.
void StagedPlan::lay_out(const std::vector<Run>& runs, const TensorView* view, int64_t piece, int64_t pieces,
                         size_t offset, std::vector<GpuPiece>& out) const {
  bool fresh = true;
  for (const Run& run : runs) {
    const int64_t begin = run.begin + cut(run.count, piece, pieces);
    const int64_t count = run.begin + cut(run.count, piece + 1, pieces) - begin;
    if (count == 0) continue;
    if (!fresh && out.back().begin + out.back().count == begin) {
      out.back().count += count;
    } else {
      out.push_back({view, begin, count, offset});
      fresh = false;
    }
    offset += static_cast<size_t>(count * width_);
  }
}

void StagedPlan::append(const Segment& segment, const Parts& parts, int64_t piece, int64_t pieces) {
  if (open_.segments.empty()) open_.first = first_;
  StagedSegment& staged = open_.segments.emplace_back();
  for (const int64_t count : parts.counts) {
    staged.counts.push_back(cut(count, piece + 1, pieces) - cut(count, piece, pieces));
  }
  staged.in_count = count_of(parts.in, piece, pieces);
  staged.out_count = count_of(parts.out, piece, pieces);
  staged.in_offset = aligned(open_.in_bytes, kAlignment);
  staged.out_offset = shared_ ? staged.in_offset : aligned(open_.out_bytes, kAlignment);
  open_.in_bytes = staged.in_offset + static_cast<size_t>(staged.in_count * width_);
  open_.out_bytes = staged.out_offset + static_cast<size_t>(staged.out_count * width_);
  open_.elements += staged.in_count;

  const bool broadcast = bucket_.kind == OpKind::kBroadcast;
  const bool root = broadcast && rank_ == bucket_.root;
  staged.present = segment.input.data != nullptr && (!broadcast || root);
  staged.wanted = segment.output.data != nullptr;
  if (staged.present) lay_out(parts.in, &segment.input, piece, pieces, staged.in_offset, open_.in);
  if (staged.wanted && !(root && same_place(segment))) {
    lay_out(parts.out, &segment.output, piece, pieces, staged.out_offset, open_.out);
  }
}

void StagedPlan::close() {
  if (open_.segments.empty()) return;
  open_.up = !open_.out.empty() && !(bucket_.kind == OpKind::kBroadcast && rank_ == bucket_.root);
  if (!shared_) {  // what it gets lies behind what it gives
    open_.out_begin = aligned(open_.in_bytes, kRegionAlignment);
    for (StagedSegment& segment : open_.segments) segment.out_offset += open_.out_begin;
    for (GpuPiece& piece : open_.out) piece.offset += open_.out_begin;
  }
  chunks_.push_back(std::move(open_));
  open_ = {};
}

}  // namespace fusewire
