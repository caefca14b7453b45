// Every rank's parts go to one rank each: rank r's row is what it gives to rank r+1, of all tensors, then to r+2, and
// so on around. So at any time every rank reads from another one, and a part comes out of the cache of who packed it.
#include <algorithm>
#include <vector>

#include "collective/part_counts.h"
#include "collective/shm_exchange.h"

namespace fusewire {

void shm_alltoall(ShmContext& context, const Bucket& given) {
  const int size = context.size();
  const int rank = context.rank;
  const DetachedBucket detached(given, size, rank);
  const Bucket& bucket = detached.get();
  const std::vector<PartCounts> counts = part_counts(bucket, size, rank);
  const size_t width = size_of(bucket.dtype);
  const auto total = [&](int giver, int taker) {
    int64_t elements = 0;
    for (const PartCounts& count : counts) elements += count(giver, taker);
    return elements;
  };
  int64_t taken = 0;
  for (int giver = 0; giver < size; ++giver) taken += total(giver, rank);
  const BucketCursor::Format format{bucket.dtype, bucket.dtype};
  const size_t written = static_cast<size_t>(taken) * width;

  // Appends what `giver` gives to `taker`: its inputs if this rank gives, its outputs if this rank takes.
  const auto append = [&](BucketCursor& row, int giver, int taker) {
    for (size_t s = 0; s < bucket.segments.size(); ++s) {
      const Segment& segment = bucket.segments[s];
      row.append(giver == rank ? &segment.input : nullptr, counts[s].in_offset(giver, taker),
                 taker == rank ? &segment.output : nullptr, counts[s].out_offset(giver, taker),
                 counts[s](giver, taker));
    }
  };
  int64_t longest = 0;
  for (int giver = 0; giver < size; ++giver) {
    BucketCursor& row = context.rows[static_cast<size_t>(giver)];
    if (giver == rank) row.start(format, 0, written);
    int64_t length = 0;
    for (int step = 1; step < size; ++step) {
      const int taker = (giver + step) % size;
      if (giver != rank && taker == rank) row.start(format, length, written);
      if (giver == rank || taker == rank) append(row, giver, taker);
      length += total(giver, taker);
    }
    longest = std::max(longest, length);
  }
  context.own.start(format, 0, written);
  append(context.own, rank, rank);
  shm_exchange(context, context.own, longest, bucket.segments.size() * static_cast<size_t>(size));
}

}  // namespace fusewire
