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

  // Elements of one entry if this is an Adasum, else any. Rank order, always: it is what makes the bits independent of
  // algorithm, chunk and fusion. `own`: where this rank's contribution lies if not in its base.
  void compute(int64_t from, int64_t count, size_t entry, const std::byte* own, std::byte* destination,
               std::byte* second) const {
    for (size_t rank = 0; rank < context.bases.size(); ++rank) {
      context.sources[rank] = context.bases[rank] + bytes_to(from);
    }
    if (own != nullptr) context.sources[static_cast<size_t>(context.rank)] = own;
    if (const Combinations* all = reduction.combinations) {
      const size_t row = entry * context.bases.size();
      cpu_kernels().combine({.sources = context.sources.data(),
                             .scales = all->scales.data() + row,
                             .coefficients = all->coefficients.data() + row,
                             .source_count = context.size(),
                             .factor = all->factors[entry],
                             .destination = destination,
                             .second = second,
                             .count = static_cast<size_t>(count),
                             .dtype = cursor.wire()});
    } else {
      cpu_kernels().reduce({.sources = context.sources.data(),
                            .source_count = context.size(),
                            .destination = destination,
                            .second = second,
                            .count = static_cast<size_t>(count),
                            .dtype = cursor.wire(),
                            .op = reduction.op,
                            .scale = reduction.scale});
    }
  }

  // A stretch of pieces that are too small, strided, absent or compressed: one kernel call for all of them, or one for
  // each where they have coefficients of their own.
  void staged(int64_t from, int64_t to) const {
    if (from == to) return;
    if (reduction.combinations == nullptr) {
      compute(from, to - from, 0, nullptr, results + bytes_to(from), nullptr);
    } else {
      cursor.for_each(from, to, [&](const BucketCursor::Piece& piece) {
        compute(piece.begin, piece.count, piece.entry, nullptr, results + bytes_to(piece.begin), nullptr);
      });
    }
    cursor.scatter(results + bytes_to(from), from, to);
  }

  void in_place(const BucketCursor::Piece& piece) const {
    std::byte* const shared = results + bytes_to(piece.begin);
    const bool stream = piece.stream && publish_results;
    compute(piece.begin, piece.count, piece.entry, piece.in, stream ? shared : piece.out,
            publish_results && !stream ? shared : nullptr);
    if (stream) stream_copy(piece.out, shared, static_cast<size_t>(piece.count) * cursor.wire_bytes());
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
