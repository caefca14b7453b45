// What every shared-memory algorithm works with, and the algorithms: one file each.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collective/bucket_cursor.h"
#include "collective/peer_memory.h"
#include "collective/reduction.h"
#include "collective/shm_geometry.h"
#include "collective/shm_region.h"
#include "collective/shm_wait.h"
#include "common/chunk_trace.h"
#include "kernels/kernels.h"

namespace fusewire {

// Note [Slot reuse]
// Chunk k uses slot k % kShmBuffers, whatever the algorithm. A rank packs into its slot only after every other rank has
// PUBLISHED that it is through with the chunk that was there before: wait_all(kCopied, k - kShmBuffers). It is never
// concluded from anything else, such as a peer's work on a later chunk: a rank that a fast algorithm lets go early may
// still be reading when the next bucket, of another algorithm, starts. So every algorithm must publish all stages of
// each chunk number it uses, those it has no use for as well.
struct ShmContext {
  ShmRegion region;
  int rank;
  ShmWaiter waiter;
  bool crowded;  // ranks outnumber cores: a wait is a context switch, so fewer and larger steps
  ShmGeometry geometry;
  int64_t chunk = 0;               // number of the last chunk used
  BucketCursor cursor;             // of the bucket that runs
  std::vector<BucketCursor> rows;  // one per rank, where ranks hold different parts
  BucketCursor own;                // what a rank gives to itself
  PeerMemory peers;
  std::vector<std::byte> scratch;
  std::vector<const std::byte*> bases;  // one per rank: see shm_reduce_home
  std::vector<const void*> sources;     // one per rank: what a kernel call gets
  ChunkStopwatch watch{};

  int size() const { return region.size(); }
};

// Everybody packs all it has, waits once, and reduces everything itself. The whole bucket must fit one slot.
void shm_allreduce_once(ShmContext& context, const Reduction& reduction);

// Chunk by chunk, each rank reduces the slice it owns and collects the others' slices, in a pipeline of three stages.
void shm_allreduce_sliced(ShmContext& context, const Reduction& reduction, size_t chunk_bytes);

// The same two ways for Adasum, `factor` times over. `chunk_bytes` is the first pass's too.
void shm_adasum_once(ShmContext& context, double factor);
void shm_adasum_sliced(ShmContext& context, double factor, size_t chunk_bytes);

// The root gives, the others take: context.cursor, which is not there any more afterwards.
void shm_broadcast(ShmContext& context, int root);

// Whose parts are which: backend.h Note [Counts]. These make their own rows.
void shm_allgather(ShmContext& context, const Bucket& bucket);
void shm_alltoall(ShmContext& context, const Bucket& bucket);
void shm_reduce_scatter(ShmContext& context, const Bucket& bucket, const Reduction& reduction,
                        const BucketCursor::Format& format);

}  // namespace fusewire
