// Element-wise work on GPU memory, launched on a stream; needs no CUDA header and no CUDA to include it. The arithmetic
// is element.h's: where the CPU kernels define a result, these give the same bits.
//
// Note [Who owns what]
// A launcher copies its arguments and returns before the kernel runs. Buffers, tables and scratch memory are device
// accessible memory of the caller's and must stay until the stream has passed the kernel. Every launcher is exactly one
// kernel launch, or none where there is nothing to do, and returns a cudaError_t (0: launched).
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "common/dtype.h"

namespace fusewire {

using CudaStream = void*;  // a cudaStream_t

// A batch of tensors between their places and a buffer. TransferPlan makes the table.
struct TransferArgs {
  const void* table = nullptr;  // device memory
  uint32_t pieces = 0;
  uint32_t tiles = 0;
  DataType dtype = DataType::kFloat32;  // of the tensors
  DataType wire = DataType::kFloat32;   // of the buffer: the same, or a narrower floating type
  void* buffer = nullptr;
  // pack: factor alone, and floating types only. unpack: as in kernels.h, the division of an Average included.
  double factor = 1.0;
  int64_t divisor = 1;
  uint64_t identity = 0;  // pack: the bits that absent tensors contribute, in the type of the buffer
  CudaStream stream = nullptr;
};

// destination[i] = scaled(sources[0][i] op sources[1][i] op ...): the CPU kernel's ReduceArgs on device memory.
constexpr int kMaxReduceSources = 32;
struct DeviceReduceArgs {
  const void* sources[kMaxReduceSources] = {};
  int source_count = 0;
  void* destination = nullptr;  // may equal one of the sources
  uint64_t count = 0;
  DataType dtype = DataType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  double factor = 1.0;
  int64_t divisor = 1;
  CudaStream stream = nullptr;
};

// Adasum on buffers with several tensors (spans) in each. SpanPlan makes the table.
constexpr int kMaxDotSources = 4;
constexpr int kMaxCombineSources = 32;
template <int kSources>
constexpr int kDotPairs = kSources * (kSources + 1) / 2;

// dots[span][pair] = sum of sources[i] * sources[j] over the span, i <= j, pairs in the order (0,0) (0,1) .. (1,1) ..;
// in fp64 and always in the same order.
struct DeviceDotArgs {
  const void* table = nullptr;
  uint32_t spans = 0;
  uint32_t tiles = 0;
  uint32_t slots = 0;
  const void* sources[kMaxDotSources] = {};
  int source_count = 0;  // 2 to 4
  DataType dtype = DataType::kFloat32;
  double* dots = nullptr;
  double* partials = nullptr;    // scratch: slots * pairs
  uint32_t* arrivals = nullptr;  // scratch: one per span, zero before the first use and again after each
  CudaStream stream = nullptr;
};

// destination = sum of coefficients[span][i] * sources[i], in fp64, rounded once. Without coefficients, for two
// sources, they are Adasum's own, computed from `dots` as DeviceDotArgs leaves them.
struct DeviceCombineArgs {
  const void* table = nullptr;  // of a SpanPlan with the same spans
  uint32_t spans = 0;
  uint32_t tiles = 0;
  const void* sources[kMaxCombineSources] = {};
  int source_count = 0;
  const double* coefficients = nullptr;  // device memory, spans * source_count
  const double* dots = nullptr;          // device memory, spans * 3
  void* destination = nullptr;           // may equal one of the sources
  DataType dtype = DataType::kFloat32;
  double factor = 1.0;
  CudaStream stream = nullptr;
};

// Block-scaled int8: quantised[i] = round(value / scale), scale = largest magnitude of the block / 127. `values` has
// `count` elements; the last block is filled up with zeros in `quantised`.
struct DeviceQuantiseArgs {
  const void* values = nullptr;
  DataType dtype = DataType::kFloat32;
  uint64_t count = 0;
  uint32_t block = 256;
  const void* error_in = nullptr;  // optional: added to the values first; double for fp64, float for the others
  void* error_out = nullptr;       // optional: what rounding lost; may equal error_in
  int8_t* quantised = nullptr;     // blocks * block
  float* scales = nullptr;         // blocks
  CudaStream stream = nullptr;
};

// total[i] += quantised[i] * scales[i / block] for each payload in turn, then total *= factor; `total` is float or
// double. With `overwrite` it is written only.
struct DeviceDequantiseArgs {
  const int8_t* quantised = nullptr;  // payloads one after the other, each of blocks * block
  const float* scales = nullptr;      // payloads one after the other, each of blocks
  uint32_t payloads = 1;
  uint32_t block = 256;
  uint64_t count = 0;
  void* total = nullptr;
  DataType dtype = DataType::kFloat32;
  bool overwrite = false;
  double factor = 1.0;
  CudaStream stream = nullptr;
};

struct CudaKernels {
  int (*pack)(const TransferArgs& args);
  int (*unpack)(const TransferArgs& args);
  int (*reduce)(const DeviceReduceArgs& args);
  int (*dot)(const DeviceDotArgs& args);
  int (*combine)(const DeviceCombineArgs& args);
  int (*quantise)(const DeviceQuantiseArgs& args);
  int (*dequantise)(const DeviceDequantiseArgs& args);
};

// Defined by the library fusewire_kernels_cuda, which exists where nvcc was found.
extern const CudaKernels kCudaKernels;

}  // namespace fusewire
