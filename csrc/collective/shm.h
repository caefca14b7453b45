// The data plane of one host: collectives through shared memory. See shm_*.cc, one algorithm per file.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>

#include "collective/backend.h"

namespace fusewire {

struct ShmOptions {
  int rank = 0;  // inside the process set
  int size = 1;
  int64_t chunk_bytes = 0;                  // 0: chosen by message size and free cores; at most 1 MiB is used
  std::chrono::microseconds spin{20};       // before a wait sleeps; 0 where ranks outnumber cores
  std::chrono::nanoseconds abort_after{0};  // a wait inside run() longer than this throws kStalled; 0: never
  int64_t direct_bytes = 0;                 // what a rank gives is read from its memory from this size on; 0: by size
};

// Bytes of shared memory that a set of `size` ranks needs; all members map the same zero-filled region of that size.
size_t shm_region_bytes(int size);

// Backend::abort() for somebody who is not a member: rank 0 hears first of a rank that died.
void shm_stop(std::byte* region, int size) noexcept;

// `region` must outlive the backend. Ranks in errors and in laggards() are those inside the set. Rank 0's chunk_bytes,
// direct_bytes and spin decide how all ranks cut buckets.
std::unique_ptr<Backend> make_shm_backend(std::byte* region, const ShmOptions& options);

}  // namespace fusewire
