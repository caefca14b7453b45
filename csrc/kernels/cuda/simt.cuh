// What all kernels here are made of: launching, vector accesses, the search for a tile's tensor, reductions of a warp.
//
// These files are compiled by nvcc, and for tests by the host's compiler under tests/cpp/simt/stand_in.h, which gives
// the CUDA names used here a meaning on the CPU. So: no texture, no cooperative group, no device library.
#pragma once

#include <stdint.h>

// element.h: Note [One namespace per instruction set]. Host code that nvcc makes of it stays apart from everybody
// else's.
#define FUSEWIRE_ISA device
#include "kernels/cuda_tables.h"
#include "kernels/element.h"

#ifdef __CUDACC__
#include <cuda_runtime_api.h>
#endif

namespace fusewire::cuda {

constexpr uint32_t kThreads = kWarpsPerBlock * kWarpLanes;
constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kInvalidValue = 1;  // cudaErrorInvalidValue

inline uint32_t blocks_for(uint64_t tiles) {
  return static_cast<uint32_t>((tiles + kWarpsPerBlock - 1) / kWarpsPerBlock);
}

// One-dimensional launch with kThreads threads per block. Kernels take one struct by value.
#ifdef __CUDACC__
template <class Params>
inline int launch(void (*kernel)(Params), uint32_t blocks, const Params& params, void* stream) {
  kernel<<<blocks, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(params);
  return static_cast<int>(cudaGetLastError());
}
__device__ inline void require_aligned(const void*, size_t) {}
#else
template <class Params>
inline int launch(void (*kernel)(Params), uint32_t blocks, const Params& params, void*) {
  simt::launch(blocks, kThreads, [&] { kernel(params); });
  return 0;
}
using simt::require_aligned;
#endif

__device__ inline uint32_t lane_id() { return threadIdx.x % kWarpLanes; }
__device__ inline uint32_t warp_id() { return threadIdx.x / kWarpLanes; }

// kCount elements that are loaded and stored at once.
template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Vector {
  T at[kCount];
};

template <class T, int kCount>
__device__ inline Vector<T, kCount> load_vector(const T* from) {
  require_aligned(from, sizeof(T) * kCount);
  return *reinterpret_cast<const Vector<T, kCount>*>(from);
}
template <class T, int kCount>
__device__ inline void store_vector(T* to, const Vector<T, kCount>& vector) {
  require_aligned(to, sizeof(T) * kCount);
  *reinterpret_cast<Vector<T, kCount>*>(to) = vector;
}

__device__ inline bool aligned_to(const void* pointer, uint32_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

// The entry i with first_tiles[i] <= tile < first_tiles[i + 1]; the whole warp asks for the same tile. Entries without
// tiles are never found.
__device__ inline uint32_t find_entry(const uint32_t* first_tiles, uint32_t entries, uint32_t tile) {
  uint32_t low = 0;
  uint32_t size = entries;  // the answer is in [low, low + size)
  while (size > 1) {
    const uint32_t step = (size + kWarpLanes - 1) / kWarpLanes;
    const uint32_t probe = lane_id() * step;
    const bool reached = probe < size && first_tiles[low + probe] <= tile;
    const uint32_t last = static_cast<uint32_t>(__popc(__ballot_sync(kAllLanes, reached))) - 1;  // pivots ascend
    low += last * step;
    size = size - last * step < step ? size - last * step : step;
  }
  return low;
}

__device__ inline uint32_t divide(uint32_t n, const Divider& by) {
  return (__umulhi(n, by.multiplier) + n) >> by.shift;
}

// The sum over the warp in every lane, in an order that depends on nothing.
__device__ inline double warp_sum(double x) {
  for (int mask = static_cast<int>(kWarpLanes) / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(kAllLanes, x, mask);
  return x;
}

}  // namespace fusewire::cuda
