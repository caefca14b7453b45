// What every algorithm over MPI works with, and the algorithms: one file each.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "collective/bucket_cursor.h"
#include "collective/mpi/mpi_link.h"
#include "collective/reduction.h"

namespace fusewire {

// Note [From where it lies]
// A range of a row that lies in one tensor without gaps and unconverted is sent from there, received there and reduced
// there; any other is packed into staging first, with its neighbours. How a row is cut never depends on it: only
// counts, dtype and the number of ranks do, which all members know.
struct MpiContext {
  MpiContext(std::shared_ptr<MpiJob> job, const MpiOptions& options, StopWord stop)
      : link(std::move(job), options, stop),
        message_bytes(options.message_bytes != 0 ? options.message_bytes : default_message(link.size())),
        rows(static_cast<size_t>(link.size())),
        taken(static_cast<size_t>(link.size())),
        sources(static_cast<size_t>(link.size())) {}

  int rank() const { return link.rank(); }
  int size() const { return link.size(); }

  // The member `distance` further on: if everybody begins with its neighbour, nobody is everybody's first.
  int after(int distance) const { return (rank() + distance) % size(); }
  int before(int distance) const { return (rank() - distance + size()) % size(); }

  // Elements of `width` bytes in one message, at least 1; a multiple of a cache line where it can be.
  int64_t message_elements(size_t width) const {
    const size_t line = kLine / width;
    const size_t elements = message_bytes / width;
    return static_cast<int64_t>(elements >= line ? elements / line * line : std::max<size_t>(elements, 1));
  }

  // Staging memory `which` with room for `bytes`; what it held is lost.
  std::byte* stage(size_t which, size_t bytes) {
    if (staging[which].size() < bytes) staging[which].resize(bytes);
    return staging[which].data();
  }

  // Staging grows with the number of messages in flight, so they shrink with the number of ranks.
  static size_t default_message(int size) {
    return std::clamp(kStaging / static_cast<size_t>(size), size_t{64} << 10, size_t{512} << 10);
  }

  static constexpr size_t kLine = 64;
  static constexpr size_t kStaging = 4 << 20;

  MpiLink link;
  size_t message_bytes;
  BucketCursor cursor;              // of the bucket that runs
  std::vector<BucketCursor> rows;   // what goes to each member, or what each owns
  std::vector<BucketCursor> taken;  // what comes from each member
  BucketCursor own;                 // what a rank gives to itself
  std::array<std::vector<std::byte>, 4> staging;
  std::vector<const void*> sources;  // one per rank: what a kernel call gets
};

// All ranks' rows to everybody, each whole, in log2(n) messages: context.sources points at them, and so does the result
// at all of that memory, with this rank's own row first. (Bruck's allgather: block j is the row of the member j ranks
// further on, and with every message the number of blocks that are there doubles.)
std::byte* mpi_gather_everything(MpiContext& context);

// Everybody reduces everything. For small buckets.
void mpi_allreduce_at_once(MpiContext& context, const Reduction& reduction);

// Each rank reduces the slice that it owns and sends the result to the others.
void mpi_allreduce_sliced(MpiContext& context, const Reduction& reduction);

// Adasum (adasum.h): small buckets as above; in others, each rank measures and combines a share of the blocks.
void mpi_adasum_at_once(MpiContext& context, double factor);
void mpi_adasum_shared(MpiContext& context, double factor);

void mpi_broadcast(MpiContext& context, int root);

// Whose parts are which: backend.h Note [Counts]. These make their own rows.
void mpi_allgather(MpiContext& context, const Bucket& bucket);
void mpi_alltoall(MpiContext& context, const Bucket& bucket);
void mpi_reduce_scatter(MpiContext& context, const Bucket& bucket, const ReductionPlan& plan);

}  // namespace fusewire
