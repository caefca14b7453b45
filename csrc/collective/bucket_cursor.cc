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

// What is copied at a time between two layouts: a part of the innermost cache.
constexpr size_t kStripBytes = 16 << 10;

// The compiler's memcpy is best for a few elements, the kernel's for a few thousand.
void copy_bytes(void* destination, const void* source, size_t bytes) {
  if (bytes <= 256) {
    std::memcpy(destination, source, bytes);
  } else {
    cpu_kernels().copy(destination, source, bytes);
  }
}

bool has_data(const TensorView* view) { return view != nullptr && view->data != nullptr; }

// Where element `offset` of a view lies when logical order is memory order, else null.
std::byte* flat(const TensorView* view, int64_t offset) {
  if (!has_data(view) || !view->is_contiguous()) return nullptr;
  return static_cast<std::byte*>(view->data) + static_cast<size_t>(offset) * size_of(view->dtype);
}

bool same_place(const BucketCursor::Piece& piece) {
  return has_data(piece.input) && has_data(piece.output) && piece.input->data == piece.output->data &&
         piece.in_offset == piece.out_offset && piece.input->strides == piece.output->strides;
}

}  // namespace

void contradiction(const std::string& what) {
  throw Error(ErrorCode::kInternal, "a bucket contradicts itself: " + what);
}

void BucketCursor::start(const Format& format, int64_t first, size_t written) {
  entries_.clear();
  hint_ = 0;
  first_ = first;
  elements_ = 0;
  format_ = format;
  wire_bytes_ = size_of(format.wire);
  direct_elements_ = static_cast<int64_t>(kDirectBytes / wire_bytes_);
  direct_ = format.wire == format.dtype && format.factor == 1.0;
  streams_ = written >= kStreamBytes;
  reads_inputs_ = true;
}

void BucketCursor::append(const TensorView* input, int64_t in_offset, const TensorView* output, int64_t out_offset,
                          int64_t count) {
  if (count == 0) return;
  if ((has_data(input) && input->dtype != format_.dtype) || (has_data(output) && output->dtype != format_.dtype)) {
    contradiction("a tensor has another dtype");
  }
  std::byte* in = flat(input, in_offset);
  const bool same = input != nullptr && output != nullptr && output->data == input->data &&
                    output->strides == input->strides && in_offset == out_offset;
  entries_.push_back(
      {first_ + elements_, count, in_offset, out_offset, in, same ? in : flat(output, out_offset), input, output});
  elements_ += count;
}

void BucketCursor::assign(const Bucket& bucket, const Format& format) {
  start(format, 0, static_cast<size_t>(bucket.elements) * size_of(format.wire));
  entries_.reserve(bucket.segments.size());
  for (const Segment& segment : bucket.segments) {
    const int64_t count = segment.input.numel();
    if (count != segment.output.numel()) contradiction("input and output of a tensor differ in size");
    if (segment.input.dtype != bucket.dtype || segment.output.dtype != bucket.dtype) {
      contradiction("a tensor has another dtype");
    }
    append(&segment.input, 0, &segment.output, 0, count);
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

void BucketCursor::gather_part(const Piece& piece, std::byte* staging) const {
  if (!has_data(piece.input)) {
    fill_identity(format_.wire, format_.identity, staging, static_cast<size_t>(piece.count));
  } else if (direct_ && piece.in != nullptr) {
    copy_bytes(staging, piece.in, static_cast<size_t>(piece.count) * wire_bytes_);
  } else {
    pack(*piece.input, piece.in_offset, piece.count, format_.wire, format_.factor, staging);
  }
}

void BucketCursor::scatter_part(const Piece& piece, const std::byte* staging) const {
  if (!has_data(piece.output)) return;
  if (format_.wire == format_.dtype && piece.out != nullptr) {
    const size_t bytes = static_cast<size_t>(piece.count) * wire_bytes_;
    piece.stream ? stream_copy(piece.out, staging, bytes) : copy_bytes(piece.out, staging, bytes);
  } else {
    unpack(staging, format_.wire, *piece.output, piece.out_offset, piece.count);
  }
}

void BucketCursor::copy_piece(const Piece& piece) {
  if (!has_data(piece.output) || same_place(piece)) return;
  if (piece.in != nullptr) return scatter_part(piece, piece.in);
  if (piece.out != nullptr) return gather_part(piece, piece.out);
  strip_.resize(kStripBytes);
  const auto step = static_cast<int64_t>(kStripBytes / wire_bytes_);
  for (int64_t done = 0; done < piece.count; done += step) {
    Piece part = piece;
    part.in_offset += done;
    part.out_offset += done;
    part.count = std::min(step, piece.count - done);
    gather_part(part, strip_.data());
    scatter_part(part, strip_.data());
  }
}

std::byte* BucketCursor::output_at(int64_t begin, int64_t end) {
  std::byte* at = nullptr;
  for_each(begin, end, [&](const Piece& piece) { at = direct_ && piece.count == end - begin ? piece.out : nullptr; });
  return at;
}

const std::byte* BucketCursor::input_at(int64_t begin, int64_t end) {
  const std::byte* at = nullptr;
  for_each(begin, end, [&](const Piece& piece) { at = direct_ && piece.count == end - begin ? piece.in : nullptr; });
  return at;
}

void BucketCursor::gather(int64_t begin, int64_t end, std::byte* staging) {
  for_each(begin, end, [&](const Piece& piece) {
    gather_part(piece, staging + static_cast<size_t>(piece.begin - begin) * wire_bytes_);
  });
}

void BucketCursor::gather_staged(int64_t begin, int64_t end, std::byte* staging) {
  for_each(begin, end, [&](const Piece& piece) {
    if (!in_place(piece)) gather_part(piece, staging + static_cast<size_t>(piece.begin - begin) * wire_bytes_);
  });
}

const std::byte* BucketCursor::in_order(int64_t begin, int64_t end, std::byte* staging) {
  const std::byte* found = staging;
  for_each(begin, end, [&](const Piece& piece) {
    if (direct_ && piece.in != nullptr && piece.count == end - begin) {
      found = piece.in;
    } else {
      gather_part(piece, staging + static_cast<size_t>(piece.begin - begin) * wire_bytes_);
    }
  });
  return found;
}

void BucketCursor::scatter(const std::byte* staging, int64_t begin, int64_t end) {
  for_each(begin, end, [&](const Piece& piece) {
    scatter_part(piece, staging + static_cast<size_t>(piece.begin - begin) * wire_bytes_);
  });
}

void BucketCursor::scatter_elsewhere(const std::byte* staging, int64_t begin, int64_t end) {
  for_each(begin, end, [&](const Piece& piece) {
    if (!same_place(piece)) scatter_part(piece, staging + static_cast<size_t>(piece.begin - begin) * wire_bytes_);
  });
}

void BucketCursor::copy_across(int64_t begin, int64_t end) {
  for_each(begin, end, [&](const Piece& piece) { copy_piece(piece); });
}

}  // namespace fusewire
