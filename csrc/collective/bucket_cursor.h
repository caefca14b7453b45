// A bucket as one long row of elements: where its segments begin and end in that row, and how to move any range of it
// between user memory and contiguous staging. The row is what ranks agree on; layouts and absences are each rank's own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collective/backend.h"
#include "kernels/kernels.h"

namespace fusewire {

class BucketCursor {
 public:
  // Part of one segment.
  struct Piece {
    int64_t begin;        // in the row
    int64_t count;        // elements
    int64_t offset;       // of the first one in its segment
    const std::byte* in;  // where the input's elements lie when they are in order without gaps, else null
    std::byte* out;       // the same of the output
    const Segment* segment;
    bool stream;  // the output is best written by stream_copy()
  };

  // Describes `bucket`, which must outlive the next call. `wire` is the type in staging, `factor` and `identity` as in
  // pack() and fill_identity(). Throws Error(kInternal) where the bucket contradicts itself.
  void assign(const Bucket& bucket, DataType wire, double factor, ReduceOp identity);

  // Whether this rank reads its inputs (assign() says yes), so that an output that is its own input is in the cache
  // when it is written.
  void set_reads_inputs(bool reads) { reads_inputs_ = reads; }

  int64_t elements() const { return elements_; }
  size_t wire_bytes() const { return wire_bytes_; }
  DataType wire() const { return wire_; }

  // Calls visit(piece) for the non-empty parts of segments that make up [begin, end), in order.
  template <typename Visit>
  void for_each(int64_t begin, int64_t end, Visit&& visit);

  // Whether a kernel may work on the piece where it lies: present, gapless, not converted, and large enough to be worth
  // a kernel call. It depends on this rank's layout, so nothing that other ranks see may.
  bool in_place(const Piece& piece) const {
    return direct_ && piece.in != nullptr && piece.out != nullptr && piece.count >= direct_elements_;
  }

  // This rank's contribution to [begin, end), into contiguous `staging`. The second form leaves holes where in_place().
  void gather(int64_t begin, int64_t end, std::byte* staging);
  void gather_staged(int64_t begin, int64_t end, std::byte* staging);

  // Results for [begin, end) to the outputs. The second form leaves out those that are their own input.
  void scatter(const std::byte* staging, int64_t begin, int64_t end);
  void scatter_elsewhere(const std::byte* staging, int64_t begin, int64_t end);

 private:
  struct Entry {
    int64_t begin;
    int64_t count;
    std::byte* in;
    std::byte* out;
    const Segment* segment;
  };

  size_t find(int64_t element);
  void gather_piece(const Piece& piece, std::byte* staging) const;
  void scatter_piece(const Piece& piece, const std::byte* staging) const;

  std::vector<Entry> entries_;  // non-empty segments only
  size_t hint_ = 0;             // ranges come in ascending order mostly
  int64_t elements_ = 0;
  int64_t direct_elements_ = 0;
  size_t wire_bytes_ = 0;
  DataType dtype_ = DataType::kFloat32;
  DataType wire_ = DataType::kFloat32;
  double factor_ = 1.0;
  ReduceOp identity_ = ReduceOp::kSum;
  bool direct_ = true;
  bool streams_ = false;
  bool reads_inputs_ = true;
};

template <typename Visit>
void BucketCursor::for_each(int64_t begin, int64_t end, Visit&& visit) {
  if (begin >= end) return;
  for (size_t i = find(begin); begin < end; ++i) {
    const Entry& entry = entries_[i];
    const int64_t offset = begin - entry.begin;
    const int64_t count = (entry.count - offset < end - begin) ? entry.count - offset : end - begin;
    const size_t bytes = static_cast<size_t>(offset) * wire_bytes_;
    visit(Piece{
        begin, count, offset, entry.in != nullptr ? entry.in + bytes : nullptr,
        entry.out != nullptr ? entry.out + bytes : nullptr, entry.segment,
        streams_ && entry.out != nullptr && count >= direct_elements_ && (entry.out != entry.in || !reads_inputs_)});
    begin += count;
    hint_ = i;
  }
}

}  // namespace fusewire
