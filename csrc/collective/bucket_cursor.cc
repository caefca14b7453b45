#include "collective/bucket_cursor.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "collective/stream_copy.h"
#include "common/error.h"

namespace fusewire {
namespace {

// Below this a kernel call per tensor costs more than staging it with its neighbours.
constexpr size_t kDirectBytes = 1024;

// The compiler's memcpy is best for a few elements, the kernel's for a few thousand.
void copy_bytes(void* destination, const void* source, size_t bytes) {
  if (bytes <= 256) {
    std::memcpy(destination, source, bytes);
  } else {
    cpu_kernels().copy(destination, source, bytes);
  }
}

[[noreturn]] void contradiction(const std::string& what) {
  throw Error(ErrorCode::kInternal, "a bucket contradicts itself: " + what);
}

// The start of a view's memory when logical order is memory order, else null.
std::byte* flat(const TensorView& view) {
  return view.data != nullptr && view.is_contiguous() ? static_cast<std::byte*>(view.data) : nullptr;
}

}  // namespace

void BucketCursor::assign(const Bucket& bucket, DataType wire, double factor, ReduceOp identity) {
  entries_.clear();
  entries_.reserve(bucket.segments.size());
  hint_ = 0;
  elements_ = 0;
  dtype_ = bucket.dtype;
  wire_ = wire;
  wire_bytes_ = size_of(wire);
  direct_elements_ = static_cast<int64_t>(kDirectBytes / wire_bytes_);
  factor_ = factor;
  identity_ = identity;
  direct_ = wire == bucket.dtype && factor == 1.0;
  streams_ = static_cast<size_t>(bucket.elements) * wire_bytes_ >= kStreamBytes;
  reads_inputs_ = true;
  for (const Segment& segment : bucket.segments) {
    const int64_t count = segment.input.numel();
    if (count != segment.output.numel()) contradiction("input and output of a tensor differ in size");
    if (segment.input.dtype != bucket.dtype || segment.output.dtype != bucket.dtype) {
      contradiction("a tensor has another dtype");
    }
    if (count == 0) continue;
    std::byte* in = flat(segment.input);
    const bool same = segment.output.data == segment.input.data && segment.output.strides == segment.input.strides;
    entries_.push_back({elements_, count, in, same ? in : flat(segment.output), &segment});
    elements_ += count;
  }
  if (elements_ != bucket.elements) contradiction("its element count is not the sum of its tensors'");
}

size_t BucketCursor::find(int64_t element) {
  for (size_t i = hint_; i < entries_.size() && i < hint_ + 2; ++i) {
    if (entries_[i].begin <= element && element < entries_[i].begin + entries_[i].count) return i;
  }
  const auto next = std::upper_bound(entries_.begin(), entries_.end(), element,
                                     [](int64_t value, const Entry& entry) { return value < entry.begin; });
  return static_cast<size_t>(next - entries_.begin()) - 1;
}

void BucketCursor::gather_piece(const Piece& piece, std::byte* staging) const {
  const TensorView& view = piece.segment->input;
  if (view.data == nullptr) {
    fill_identity(wire_, identity_, staging, static_cast<size_t>(piece.count));
  } else if (direct_ && piece.in != nullptr) {
    copy_bytes(staging, piece.in, static_cast<size_t>(piece.count) * wire_bytes_);
  } else {
    pack(view, piece.offset, piece.count, wire_, factor_, staging);
  }
}

void BucketCursor::scatter_piece(const Piece& piece, const std::byte* staging) const {
  const TensorView& view = piece.segment->output;
  if (view.data == nullptr) return;
  if (wire_ == dtype_ && piece.out != nullptr) {
    const size_t bytes = static_cast<size_t>(piece.count) * wire_bytes_;
    piece.stream ? stream_copy(piece.out, staging, bytes) : copy_bytes(piece.out, staging, bytes);
  } else {
    unpack(staging, wire_, view, piece.offset, piece.count);
  }
}

void BucketCursor::gather(int64_t begin, int64_t end, std::byte* staging) {
  for_each(begin, end, [&](const Piece& piece) {
    gather_piece(piece, staging + static_cast<size_t>(piece.begin - begin) * wire_bytes_);
  });
}

void BucketCursor::gather_staged(int64_t begin, int64_t end, std::byte* staging) {
  for_each(begin, end, [&](const Piece& piece) {
    if (!in_place(piece)) gather_piece(piece, staging + static_cast<size_t>(piece.begin - begin) * wire_bytes_);
  });
}

void BucketCursor::scatter(const std::byte* staging, int64_t begin, int64_t end) {
  for_each(begin, end, [&](const Piece& piece) {
    scatter_piece(piece, staging + static_cast<size_t>(piece.begin - begin) * wire_bytes_);
  });
}

void BucketCursor::scatter_elsewhere(const std::byte* staging, int64_t begin, int64_t end) {
  for_each(begin, end, [&](const Piece& piece) {
    const Segment& segment = *piece.segment;
    const bool same = segment.output.data == segment.input.data && segment.output.strides == segment.input.strides;
    if (!same) scatter_piece(piece, staging + static_cast<size_t>(piece.begin - begin) * wire_bytes_);
  });
}

}  // namespace fusewire
