// Every rank's part goes to all: rank r's row is its parts of all tensors.
#include <algorithm>
#include <vector>

#include "collective/part_counts.h"
#include "collective/shm_exchange.h"

namespace fusewire {

void shm_allgather(ShmContext& context, const Bucket& given) {
  const DetachedBucket detached(given, context.size(), context.rank);
  const Bucket& bucket = detached.get();
  const std::vector<PartCounts> counts = part_counts(bucket, context.size(), context.rank);
  const size_t width = size_of(bucket.dtype);
  int64_t longest = 0;
  int64_t taken = 0;
  for (int giver = 0; giver < context.size(); ++giver) {
    int64_t length = 0;
    for (const PartCounts& count : counts) length += count(giver, context.rank);
    longest = std::max(longest, length);
    taken += length;
  }
  for (int giver = 0; giver < context.size(); ++giver) {
    const bool own = giver == context.rank;
    BucketCursor& row = context.rows[static_cast<size_t>(giver)];
    row.start({bucket.dtype, bucket.dtype}, 0, static_cast<size_t>(taken) * width);
    row.set_reads_inputs(own);
    for (size_t s = 0; s < bucket.segments.size(); ++s) {
      const Segment& segment = bucket.segments[s];
      row.append(own ? &segment.input : nullptr, 0, &segment.output, counts[s].out_offset(giver, context.rank),
                 counts[s](giver, context.rank));
    }
  }
  shm_exchange(context, context.rows[static_cast<size_t>(context.rank)], longest, bucket.segments.size());
}

}  // namespace fusewire
