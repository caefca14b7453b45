#include "collective/shm_reduce.h"

#include "collective/stream_copy.h"

namespace fusewire {
namespace {

struct Range {
  ShmContext& context;
  BucketCursor& cursor;
  const Reduction& reduction;
  int64_t begin;
  std::byte* results;
  bool publish_results;

  size_t bytes_to(int64_t element) const { return static_cast<size_t>(element - begin) * cursor.wire_bytes(); }

  // Rank order, always: it is what makes the bits independent of algorithm, chunk and fusion.
  ReduceArgs args(int64_t from, int64_t count) const {
    for (size_t rank = 0; rank < context.bases.size(); ++rank) {
      context.sources[rank] = context.bases[rank] + bytes_to(from);
    }
    ReduceArgs args;
    args.sources = context.sources.data();
    args.source_count = context.size();
    args.count = static_cast<size_t>(count);
    args.dtype = cursor.wire();
    args.op = reduction.op;
    args.scale = reduction.scale;
    return args;
  }

  // A stretch of pieces that are too small, strided, absent or compressed: one kernel call for all of them.
  void staged(int64_t from, int64_t to) const {
    if (from == to) return;
    ReduceArgs call = args(from, to - from);
    call.destination = results + bytes_to(from);
    cpu_kernels().reduce(call);
    cursor.scatter(results + bytes_to(from), from, to);
  }

  void in_place(const BucketCursor::Piece& piece) const {
    ReduceArgs call = args(piece.begin, piece.count);
    context.sources[static_cast<size_t>(context.rank)] = piece.in;
    std::byte* const shared = results + bytes_to(piece.begin);
    const bool stream = piece.stream && publish_results;
    call.destination = stream ? shared : piece.out;
    call.second = publish_results && !stream ? shared : nullptr;
    cpu_kernels().reduce(call);
    if (stream) stream_copy(piece.out, shared, call.count * cursor.wire_bytes());
  }
};

}  // namespace

void shm_reduce_home(ShmContext& context, BucketCursor& cursor, const Reduction& reduction, int64_t begin, int64_t end,
                     std::byte* results, bool publish_results) {
  const Range range{context, cursor, reduction, begin, results, publish_results};
  int64_t waiting = begin;  // staged pieces from here on have not been reduced yet
  cursor.for_each(begin, end, [&](const BucketCursor::Piece& piece) {
    if (!cursor.in_place(piece)) return;
    range.staged(waiting, piece.begin);
    range.in_place(piece);
    waiting = piece.begin + piece.count;
  });
  range.staged(waiting, end);
}

}  // namespace fusewire
