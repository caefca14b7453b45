// Members give parts of tensors to each other: allgather and alltoall, of any counts.
#include <algorithm>

#include "collective/mpi/mpi_context.h"
#include "collective/part_counts.h"

namespace fusewire {
namespace {

using Purpose = MpiLink::Purpose;

// context.rows[t] is what this rank gives to member t, context.taken[g] what it takes from member g; `same` says that
// all rows are the one of the next member. Message k of a row is its k-th stretch; two are in flight between any two
// members, so that one travels while another is packed or unpacked.
class Exchange {
 public:
  Exchange(MpiContext& context, size_t width, bool same)
      : context_(context), width_(width), step_(context.message_elements(width)), same_(same) {}

  void run() {
    int64_t longest = 0;
    for (int r = 0; r < context_.size(); ++r) {
      if (r == context_.rank()) continue;
      longest = std::max({longest, given(r).elements(), taken(r).elements()});
    }
    // A single short message needs staging of its own length only.
    stride_ = static_cast<size_t>(std::min(step_, longest)) * width_;
    for (size_t i = 0; i < context_.staging.size(); ++i) {
      context_.stage(i, stride_ * static_cast<size_t>(context_.size()));
    }
    const int64_t messages = (longest + step_ - 1) / step_;
    for (int64_t k = 0; k < messages; ++k) {
      if (k >= 2) finish(k - 2);
      post(k);
      if (k == 0) context_.own.copy_across(0, context_.own.elements());
    }
    if (messages == 0) context_.own.copy_across(0, context_.own.elements());
    for (int64_t k = std::max<int64_t>(0, messages - 2); k < messages; ++k) finish(k);
  }

 private:
  BucketCursor& given(int taker) { return context_.rows[static_cast<size_t>(same_ ? context_.after(1) : taker)]; }
  BucketCursor& taken(int giver) { return context_.taken[static_cast<size_t>(giver)]; }

  static Purpose purpose(int64_t k) { return k % 2 == 0 ? MpiLink::kGive : MpiLink::kGiveNext; }
  std::byte* outgoing(int64_t k, int taker) {
    return context_.staging[static_cast<size_t>(k % 2)].data() + stride_ * static_cast<size_t>(taker);
  }
  std::byte* incoming(int64_t k, int giver) {
    return context_.staging[static_cast<size_t>(2 + k % 2)].data() + stride_ * static_cast<size_t>(giver);
  }

  // The ends of message k of a row; begin >= end where the row is shorter.
  int64_t begin(int64_t k) const { return k * step_; }
  int64_t end(int64_t k, const BucketCursor& row) const { return std::min(begin(k) + step_, row.elements()); }

  void post(int64_t k) {
    const auto trace = context_.link.watch().step(ChunkStep::kPack);
    for (int distance = 1; distance < context_.size(); ++distance) {
      const int giver = context_.before(distance);
      BucketCursor& row = taken(giver);
      if (begin(k) >= row.elements()) continue;
      std::byte* const there = row.output_at(begin(k), end(k, row));
      context_.link.receive(purpose(k), giver, there != nullptr ? there : incoming(k, giver), bytes(k, row));
    }
    const std::byte* packed = nullptr;
    for (int distance = 1; distance < context_.size(); ++distance) {
      const int taker = context_.after(distance);
      BucketCursor& row = given(taker);
      if (begin(k) >= row.elements()) continue;
      if (packed == nullptr || !same_) packed = row.in_order(begin(k), end(k, row), outgoing(k, taker));
      context_.link.send(purpose(k), taker, packed, bytes(k, row));
    }
  }

  void finish(int64_t k) {
    const auto trace = context_.link.watch().step(ChunkStep::kUnpack);
    context_.link.wait(purpose(k));
    for (int giver = 0; giver < context_.size(); ++giver) {
      BucketCursor& row = taken(giver);
      if (giver == context_.rank() || begin(k) >= row.elements()) continue;
      if (row.output_at(begin(k), end(k, row)) == nullptr) row.scatter(incoming(k, giver), begin(k), end(k, row));
    }
  }

  size_t bytes(int64_t k, const BucketCursor& row) const {
    return static_cast<size_t>(end(k, row) - begin(k)) * width_;
  }

  MpiContext& context_;
  const size_t width_;  // of an element
  const int64_t step_;  // elements in a message
  const bool same_;
  size_t stride_ = 0;
};

void exchange(MpiContext& context, const Bucket& given) {
  const int size = context.size();
  const int rank = context.rank();
  const DetachedBucket detached(given, size, rank);
  const Bucket& bucket = detached.get();
  const std::vector<PartCounts> counts = part_counts(bucket, size, rank);
  const BucketCursor::Format format{bucket.dtype, bucket.dtype};
  const bool same = bucket.kind == OpKind::kAllgather;
  const auto fill = [&](BucketCursor& row, int giver, int taker) {
    row.start(format, 0, 0);
    for (size_t s = 0; s < bucket.segments.size(); ++s) {
      const Segment& segment = bucket.segments[s];
      row.append(giver == rank ? &segment.input : nullptr, counts[s].in_offset(giver, taker),
                 taker == rank ? &segment.output : nullptr, counts[s].out_offset(giver, taker),
                 counts[s](giver, taker));
    }
  };
  for (int other = 0; other < size; ++other) {
    if (other == rank) continue;
    if (!same || other == context.after(1)) fill(context.rows[static_cast<size_t>(other)], rank, other);
    fill(context.taken[static_cast<size_t>(other)], other, rank);
  }
  fill(context.own, rank, rank);
  Exchange(context, size_of(bucket.dtype), same).run();
}

}  // namespace

void mpi_allgather(MpiContext& context, const Bucket& bucket) { exchange(context, bucket); }
void mpi_alltoall(MpiContext& context, const Bucket& bucket) { exchange(context, bucket); }

}  // namespace fusewire
