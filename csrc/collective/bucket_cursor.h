// A bucket as one long row of elements: where parts of its segments begin and end in that row, and how to move any
// range of it between user memory and contiguous staging. The row is what ranks agree on; layouts and absences are each
// rank's own. A collective in which ranks hold different parts has several rows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "collective/backend.h"
#include "kernels/kernels.h"

namespace fusewire {

// Throws Error(kInternal): members or parts of a bucket do not fit together.
[[noreturn]] void contradiction(const std::string& what);

class BucketCursor {
 public:
  // Part of one segment.
  struct Piece {
    int64_t begin;            // in the row
    int64_t count;            // elements
    int64_t in_offset;        // of the first one in the input
    int64_t out_offset;       // and in the output
    const std::byte* in;      // where the input's elements lie when they are in order without gaps, else null
    std::byte* out;           // the same of the output
    const TensorView* input;  // null: this rank has no part in it (a view without data: it is absent)
    const TensorView* output;
    size_t entry;  // number of the part in the row, empty ones not counted
    bool stream;   // the output is best written by stream_copy()
  };

  // How a row is moved: its type here and in staging, what packing multiplies by, and what an absent rank contributes
  // (pack() and fill_identity() in kernels.h).
  struct Format {
    DataType dtype = DataType::kFloat32;
    DataType wire = DataType::kFloat32;
    double factor = 1.0;
    ReduceOp identity = ReduceOp::kSum;
  };

  // The row in which every segment's elements follow one another, the same for all ranks. `bucket` must outlive the
  // next assign() or start(). Throws Error(kInternal) where the bucket contradicts itself.
  void assign(const Bucket& bucket, const Format& format);

  // Any other row: start() an empty one and append() its parts. What the cursor describes begins at element `first` of
  // the row that the ranks agree on; asking for what lies outside is allowed and finds nothing. `written` is how many
  // bytes this rank writes to its outputs in the whole collective. Empty parts are left out; the views must outlive
  // the next start().
  void start(const Format& format, int64_t first, size_t written);
  void append(const TensorView* input, int64_t in_offset, const TensorView* output, int64_t out_offset, int64_t count);

  // Whether this rank reads its inputs (assign() says yes), so that an output that is its own input is in the cache
  // when it is written.
  void set_reads_inputs(bool reads) { reads_inputs_ = reads; }

  int64_t first() const { return first_; }
  int64_t elements() const { return elements_; }
  size_t wire_bytes() const { return wire_bytes_; }
  bool overlaps(int64_t begin, int64_t end) const { return begin < first_ + elements_ && end > first_; }
  DataType wire() const { return format_.wire; }

  // Parts of segments that are not empty, and where each one lies.
  size_t entries() const { return entries_.size(); }
  std::pair<int64_t, int64_t> entry(size_t index) const {
    return {entries_[index].begin, entries_[index].begin + entries_[index].count};
  }

  // Calls visit(piece) for the non-empty parts of segments that make up [begin, end), in order.
  template <typename Visit>
  void for_each(int64_t begin, int64_t end, Visit&& visit);

  // Whether a kernel may work on the piece where it lies: present, gapless, not converted, and large enough to be worth
  // a kernel call. It depends on this rank's layout, so nothing that other ranks see may.
  bool in_place(const Piece& piece) const {
    return direct_ && piece.in != nullptr && piece.out != nullptr && piece.count >= direct_elements_;
  }

  // Where the result for all of [begin, end) is to lie, if that is in order, without gaps and unconverted; else null.
  // Like in_place(), only this rank's business.
  std::byte* output_at(int64_t begin, int64_t end);

  // The same of this rank's contribution.
  const std::byte* input_at(int64_t begin, int64_t end);

  // This rank's contribution to [begin, end), into contiguous `staging`. The second form leaves holes where in_place().
  void gather(int64_t begin, int64_t end, std::byte* staging);
  void gather_staged(int64_t begin, int64_t end, std::byte* staging);

  // The contribution to [begin, end), which is not empty: where it lies if that is one entry and needs no packing, else
  // in `staging`.
  const std::byte* in_order(int64_t begin, int64_t end, std::byte* staging);

  // One piece of for_each(), `staging` being its own.
  void gather_part(const Piece& piece, std::byte* staging) const;
  void scatter_part(const Piece& piece, const std::byte* staging) const;

  // Results for [begin, end) to the outputs. The second form leaves out those that are their own input.
  void scatter(const std::byte* staging, int64_t begin, int64_t end);
  void scatter_elsewhere(const std::byte* staging, int64_t begin, int64_t end);

  // From this rank's inputs to its own outputs; only for rows that are not converted.
  void copy_across(int64_t begin, int64_t end);

 private:
  struct Entry {
    int64_t begin;
    int64_t count;
    int64_t in_offset;
    int64_t out_offset;
    std::byte* in;
    std::byte* out;
    const TensorView* input;
    const TensorView* output;
  };

  size_t find(int64_t element);
  void copy_piece(const Piece& piece);

  std::vector<Entry> entries_;    // non-empty ones only
  std::vector<std::byte> strip_;  // between two strided layouts
  size_t hint_ = 0;               // ranges come in ascending order mostly
  int64_t first_ = 0;
  int64_t elements_ = 0;
  int64_t direct_elements_ = 0;
  size_t wire_bytes_ = 0;
  Format format_;
  bool direct_ = true;
  bool streams_ = false;
  bool reads_inputs_ = true;
};

template <typename Visit>
void BucketCursor::for_each(int64_t begin, int64_t end, Visit&& visit) {
  begin = std::max(begin, first_);
  end = std::min(end, first_ + elements_);
  if (begin >= end) return;
  for (size_t i = find(begin); begin < end; ++i) {
    const Entry& entry = entries_[i];
    const int64_t offset = begin - entry.begin;
    const int64_t count = std::min(entry.count - offset, end - begin);
    const size_t bytes = static_cast<size_t>(offset) * wire_bytes_;
    visit(Piece{
        begin, count, entry.in_offset + offset, entry.out_offset + offset,
        entry.in != nullptr ? entry.in + bytes : nullptr, entry.out != nullptr ? entry.out + bytes : nullptr,
        entry.input, entry.output, i,
        streams_ && entry.out != nullptr && count >= direct_elements_ && (entry.out != entry.in || !reads_inputs_)});
    begin += count;
    hint_ = i;
  }
}

}  // namespace fusewire
