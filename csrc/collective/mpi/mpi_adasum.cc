// Adasum over MPI: the same measures, blocks and combinations as in shared memory (adasum_measure.h), hence the same
// bits. Contributions travel once: the rank that measures a share of the blocks keeps them, and combines them when all
// measures are known. That takes as much memory as the bucket itself.
#include <algorithm>
#include <cstring>
#include <vector>

#include "collective/adasum_measure.h"
#include "collective/mpi/mpi_context.h"

namespace fusewire {
namespace {

using Blocks = std::vector<AdasumBlock>;

// Elements [begin, end) of the bucket's row out of context.sources, which begin at `begin`, to `destination`.
void combine(MpiContext& context, const Combinations& found, int64_t begin, int64_t end, std::byte* destination) {
  const auto n = static_cast<size_t>(context.size());
  std::vector<const void*> sources(n);
  context.cursor.for_each(begin, end, [&](const BucketCursor::Piece& piece) {
    const size_t offset = static_cast<size_t>(piece.begin - begin) * context.cursor.wire_bytes();
    for (size_t r = 0; r < n; ++r) sources[r] = static_cast<const std::byte*>(context.sources[r]) + offset;
    cpu_kernels().combine({.sources = sources.data(),
                           .scales = found.scales.data() + piece.entry * n,
                           .coefficients = found.coefficients.data() + piece.entry * n,
                           .source_count = context.size(),
                           .factor = found.factors[piece.entry],
                           .destination = destination + offset,
                           .count = static_cast<size_t>(piece.count),
                           .dtype = context.cursor.wire()});
  });
}

class SharedAdasum {
 public:
  explicit SharedAdasum(MpiContext& context)
      : context_(context), cursor_(context.cursor), blocks_(adasum_blocks(cursor_)), width_(cursor_.wire_bytes()) {}

  void run(double factor) {
    give();
    const AdasumCombiner combiner(cursor_, context_.size(), factor, [this](AdasumMeasure& measure) { pass(measure); });
    spread(combiner.found());
  }

 private:
  // The blocks of one rank, and their elements.
  struct Share {
    size_t first;
    size_t last;
    int64_t begin;
    int64_t end;
  };
  Share share(int rank) const {
    const auto cut = [&](int r) {
      return blocks_.size() * static_cast<size_t>(r) / static_cast<size_t>(context_.size());
    };
    const size_t first = cut(rank);
    const size_t last = cut(rank + 1);
    const auto begin = [&](size_t block) { return block < blocks_.size() ? blocks_[block].begin : cursor_.elements(); };
    return {first, last, begin(first), begin(last)};
  }
  size_t bytes(const Share& share) const { return static_cast<size_t>(share.end - share.begin) * width_; }

  // In pieces, because MPI counts in ints.
  template <typename Post>
  void in_pieces(const Share& share, Post&& post) const {
    const auto most = std::max<int64_t>(1, static_cast<int64_t>(context_.message_bytes * kLargePieces / width_));
    for (int64_t begin = share.begin; begin < share.end; begin += most) post(begin, std::min(begin + most, share.end));
  }

  size_t bytes_between(int64_t begin, int64_t end) const { return static_cast<size_t>(end - begin) * width_; }

  // Everybody's contributions to this rank's share come to staging 1, one after another.
  void give() {
    const auto trace = context_.link.watch().step(ChunkStep::kPack);
    const Share mine = share(context_.rank());
    std::byte* const packed = context_.stage(0, bytes_between(0, cursor_.elements()));
    std::byte* const taken = context_.stage(1, bytes(mine) * static_cast<size_t>(context_.size()));
    for (int distance = 1; distance < context_.size(); ++distance) {
      const int from = context_.before(distance);
      in_pieces(mine, [&](int64_t begin, int64_t end) {
        context_.link.receive(MpiLink::kGive, from, place(taken, from, mine) + bytes_between(mine.begin, begin),
                              bytes_between(begin, end));
      });
    }
    for (int distance = 1; distance < context_.size(); ++distance) {
      const int to = context_.after(distance);
      in_pieces(share(to), [&](int64_t begin, int64_t end) {
        context_.link.send(MpiLink::kGive, to, cursor_.in_order(begin, end, packed + bytes_between(0, begin)),
                           bytes_between(begin, end));
      });
    }
    for (int r = 0; r < context_.size(); ++r) context_.sources[static_cast<size_t>(r)] = place(taken, r, mine);
    if (mine.begin < mine.end) {
      context_.sources[static_cast<size_t>(context_.rank())] =
          cursor_.in_order(mine.begin, mine.end, place(taken, context_.rank(), mine));
    }
    context_.link.wait(MpiLink::kGive);
  }
  std::byte* place(std::byte* taken, int rank, const Share& mine) const {
    return taken + bytes(mine) * static_cast<size_t>(rank);
  }

  // Every rank measures its share; all add all measures.
  void pass(AdasumMeasure& measure) {
    const auto trace = context_.link.watch().step(ChunkStep::kReduce);
    const size_t values = measure.values();
    std::vector<double> results(blocks_.size() * values);
    const Share mine = share(context_.rank());
    std::vector<const void*> sources(context_.sources.size());
    for (size_t b = mine.first; b < mine.last; ++b) {
      for (size_t r = 0; r < sources.size(); ++r) {
        sources[r] = static_cast<const std::byte*>(context_.sources[r]) + bytes_between(mine.begin, blocks_[b].begin);
      }
      measure.compute(blocks_[b], sources.data(), results.data() + b * values);
    }
    const auto part = [&](int rank) {
      return reinterpret_cast<std::byte*>(results.data() + share(rank).first * values);
    };
    const auto part_bytes = [&](int rank) { return (share(rank).last - share(rank).first) * values * sizeof(double); };
    for (int distance = 1; distance < context_.size(); ++distance) {
      const int from = context_.before(distance);
      context_.link.receive(MpiLink::kGive, from, part(from), part_bytes(from));
    }
    for (int distance = 1; distance < context_.size(); ++distance) {
      context_.link.send(MpiLink::kGive, context_.after(distance), part(context_.rank()), part_bytes(context_.rank()));
    }
    context_.link.wait(MpiLink::kGive);
    for (size_t b = 0; b < blocks_.size(); ++b) measure.add(blocks_[b], results.data() + b * values);
  }

  // What the others have combined comes to its place, or to staging 0.
  void spread(const Combinations& found) {
    const auto trace = context_.link.watch().step(ChunkStep::kUnpack);
    std::byte* const packed = context_.staging[0].data();
    const auto target = [&](int64_t begin, int64_t end) {
      std::byte* const there = cursor_.output_at(begin, end);
      return there != nullptr ? there : packed + bytes_between(0, begin);
    };
    for (int distance = 1; distance < context_.size(); ++distance) {
      const int from = context_.before(distance);
      in_pieces(share(from), [&](int64_t begin, int64_t end) {
        context_.link.receive(MpiLink::kReturn, from, target(begin, end), bytes_between(begin, end));
      });
    }
    const Share mine = share(context_.rank());
    if (mine.begin < mine.end) {
      std::byte* const there = target(mine.begin, mine.end);
      combine(context_, found, mine.begin, mine.end, there);
      for (int distance = 1; distance < context_.size(); ++distance) {
        in_pieces(mine, [&](int64_t begin, int64_t end) {
          context_.link.send(MpiLink::kReturn, context_.after(distance), there + bytes_between(mine.begin, begin),
                             bytes_between(begin, end));
        });
      }
      if (there == packed + bytes_between(0, mine.begin)) cursor_.scatter(there, mine.begin, mine.end);
    }
    context_.link.wait(MpiLink::kReturn);
    for (int from = 0; from < context_.size(); ++from) {
      if (from == context_.rank()) continue;
      in_pieces(share(from), [&](int64_t begin, int64_t end) {
        if (cursor_.output_at(begin, end) == nullptr) cursor_.scatter(packed + bytes_between(0, begin), begin, end);
      });
    }
  }

  static constexpr size_t kLargePieces = 64;  // in messages: nothing is pipelined here

  MpiContext& context_;
  BucketCursor& cursor_;
  const Blocks blocks_;
  const size_t width_;
};

}  // namespace

void mpi_adasum_at_once(MpiContext& context, double factor) {
  BucketCursor& cursor = context.cursor;
  std::byte* const blocks_of_rows = mpi_gather_everything(context);
  const auto trace = context.link.watch().step(ChunkStep::kReduce);
  const Blocks blocks = adasum_blocks(cursor);
  const std::vector<const void*> rows = context.sources;
  const AdasumCombiner combiner(cursor, context.size(), factor, [&](AdasumMeasure& measure) {
    std::vector<double> results(measure.values());
    std::vector<const void*> sources(rows.size());
    for (const AdasumBlock& block : blocks) {
      for (size_t r = 0; r < rows.size(); ++r) {
        sources[r] = static_cast<const std::byte*>(rows[r]) + static_cast<size_t>(block.begin) * cursor.wire_bytes();
      }
      measure.compute(block, sources.data(), results.data());
      measure.add(block, results.data());
    }
  });
  combine(context, combiner.found(), 0, cursor.elements(), blocks_of_rows);
  cursor.scatter(blocks_of_rows, 0, cursor.elements());
}

void mpi_adasum_shared(MpiContext& context, double factor) { SharedAdasum(context).run(factor); }

}  // namespace fusewire
