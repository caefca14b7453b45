// A stand-in for the CUDA execution model, so that the .cu files of csrc/kernels/cuda run on the CPU under GoogleTest
// and the sanitizers: include this header, then the .cu file, in a C++ file.
//
// Note [Fibers for CUDA threads]
// Every CUDA thread of a block is a fiber with its own stack. A fiber runs until it waits: for its block
// (__syncthreads) or for its warp (shuffles, ballots, __syncwarp). Those that may run are taken in random order, as are
// the blocks of a grid, so a result that depends on an order shows as a difference between seeds: a missing barrier, a
// read before the write. Blocks run one after the other, each to its end, hence a kernel must not wait for another
// block (on a GPU it must not either, unless all blocks are resident).
//
// Stricter than the hardware where the hardware is undefined: waiting for threads that have returned, or in two places
// at once, ends the program with a sentence. Shared memory holds what the last block left in it.
//
// Only what the kernels use is here: one-dimensional grids and blocks, full-warp masks, no textures, no streams.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>

namespace fusewire::simt {

constexpr unsigned kWarp = 32;

struct Index {
  unsigned x;
};

// Runs `kernel` once in every thread of the grid. Throws nothing; a failure inside ends the program.
void launch(unsigned blocks, unsigned threads, const std::function<void()>& kernel);

// Seeds the order of blocks and fibers on this thread from now on, and tells how many kernels it has launched.
void seed(uint64_t value);
uint64_t launches();
void count_launch();  // of a kernel that is no program of fibers

// For the running fiber.
Index thread_index();
Index block_index();
Index block_size();
Index grid_size();

void wait_for_block();
int wait_for_block_or(int predicate);
// Gives `value` to the warp and waits until all its lanes have done so; what lane i gave is then at(i).
class Exchange {
 public:
  explicit Exchange(uint64_t value);
  uint64_t at(unsigned lane) const { return values_[lane]; }

 private:
  const uint64_t* values_;
};
unsigned lane();
unsigned warp_width();  // 32 but for the last warp of a block whose size is no multiple of 32

[[noreturn]] void fail(const char* sentence);

inline void require_aligned(const void* pointer, size_t bytes) {
  if (reinterpret_cast<uintptr_t>(pointer) % bytes != 0) fail("a vector access is not aligned to its size");
}

// The value of lane `source`, or one's own where there is no such lane.
template <class T>
T shuffle(T value, unsigned source) {
  static_assert(sizeof(T) <= sizeof(uint64_t), "shuffles carry 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  const Exchange exchange(bits);
  if (source < warp_width()) {
    bits = exchange.at(source);
    std::memcpy(&value, &bits, sizeof(T));
  }
  return value;
}

}  // namespace fusewire::simt

// ---- CUDA's names ----

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static thread_local
#define __restrict__
#define threadIdx (::fusewire::simt::thread_index())
#define blockIdx (::fusewire::simt::block_index())
#define blockDim (::fusewire::simt::block_size())
#define gridDim (::fusewire::simt::grid_size())

inline void __syncthreads() { ::fusewire::simt::wait_for_block(); }
inline int __syncthreads_or(int predicate) { return ::fusewire::simt::wait_for_block_or(predicate); }
inline void __syncwarp() { ::fusewire::simt::Exchange(0); }
inline void __threadfence() {}
template <class T>
T __shfl_sync(unsigned, T value, int source) {
  return ::fusewire::simt::shuffle(value, static_cast<unsigned>(source));
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return ::fusewire::simt::shuffle(value, ::fusewire::simt::lane() ^ static_cast<unsigned>(mask));
}
inline unsigned __ballot_sync(unsigned, int predicate) {
  const ::fusewire::simt::Exchange exchange(predicate != 0);
  unsigned bits = 0;
  for (unsigned i = 0; i < ::fusewire::simt::warp_width(); ++i) bits |= static_cast<unsigned>(exchange.at(i)) << i;
  return bits;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline unsigned atomicAdd(unsigned* at, unsigned value) {
  const unsigned before = *at;
  *at += value;
  return before;
}
