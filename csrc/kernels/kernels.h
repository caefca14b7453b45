// Element-wise work on CPU memory: copy, cast, reduce. One source (cpu/) is compiled once per instruction set and the
// best table is picked at run time; every table equals the plain reference bit for bit, at every offset and tail.
//
// Numbers. fp16 and bf16 accumulate in fp32, fp32 in fp64, integers in 64 bits (so sums are exact modulo the width),
// and the scale is applied once, in the accumulator, before the one rounding. Sources are combined in the order given:
// callers pass them in rank order, which is what makes a result independent of fusion, chunking and arrival.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "common/types.h"

namespace fusewire {

// result = round(accumulator * factor / divisor). The divisor (rank count of an Average) is kept apart from the factor
// so that integers divide exactly (truncating toward zero) when factor == 1, and fp64 means are divided, not multiplied
// by an inexact reciprocal. Min, Max and Product take factor too (divisor 1).
struct Scale {
  double factor = 1.0;
  int64_t divisor = 1;
};

struct ReduceArgs {
  const void* const* sources = nullptr;  // `source_count` arrays of `count` elements, in rank order
  int source_count = 0;                  // 1 is valid: only the scale is applied
  void* destination = nullptr;           // may equal one of the sources
  void* second = nullptr;                // optional: the same result is stored here too (the slot others read)
  size_t count = 0;
  DataType dtype = DataType::kFloat32;
  ReduceOp op = ReduceOp::kSum;  // kAverage means kSum; the division comes from `scale`
  Scale scale;
};

// All dot products of floating sources among each other in fp64, in an order that depends on `count` alone. scales[s]
// is a power of two that source s is multiplied by first where dtype is fp64 (no other type's squares leave fp64).
struct DotArgs {
  const void* const* sources = nullptr;  // `source_count` arrays of `count` elements
  const double* scales = nullptr;        // `source_count` of them, whatever the dtype
  int source_count = 0;
  size_t count = 0;
  DataType dtype = DataType::kFloat32;
  double* dots = nullptr;  // of sources (0, 0), (0, 1), ... (0, n - 1), (1, 1), (1, 2), ...
};

// result = round((sum of (source * scale) * coefficient) * factor), floating types only, computed in fp64.
struct CombineArgs {
  const void* const* sources = nullptr;
  const double* scales = nullptr;  // as in DotArgs
  const double* coefficients = nullptr;
  int source_count = 0;
  double factor = 1.0;
  void* destination = nullptr;  // may equal one of the sources
  void* second = nullptr;       // as in ReduceArgs
  size_t count = 0;
  DataType dtype = DataType::kFloat32;
};

struct CpuKernels {
  std::string_view isa;  // "reference", "sse2", "avx2", "avx512" ("neon" on arm)

  // memcpy by vector loops (glibc's switches to `rep movsb` at sizes where that is slow for cache-resident slots).
  void (*copy)(void* destination, const void* source, size_t bytes);

  // Floating point to floating point, destination = round(source * factor). from and to may be equal.
  void (*cast)(DataType from, const void* source, DataType to, void* destination, size_t count, double factor);

  void (*reduce)(const ReduceArgs& args);

  // For Adasum; see kernels/adasum.h for the order of operations.
  void (*dots)(const DotArgs& args);
  void (*combine)(const CombineArgs& args);
};

const CpuKernels& cpu_kernels();                         // the best one for this machine, chosen once
std::vector<const CpuKernels*> available_cpu_kernels();  // the reference first; for tests and `fusewire info`

// The element that leaves `op` unchanged (0, 1, +inf or the largest value, ...).
void fill_identity(DataType dtype, ReduceOp op, void* destination, size_t count);

// Gathers logical elements [begin, begin + count) of `view` (any strides) into contiguous `destination`, converting to
// `wire` (equal to view.dtype, or a narrower floating type) and multiplying by `factor` (1 unless the type narrows).
void pack(const TensorView& view, int64_t begin, int64_t count, DataType wire, double factor, void* destination);

// The way back: scatters contiguous elements of type `wire` into logical elements [begin, begin + count) of `view`.
void unpack(const void* source, DataType wire, const TensorView& view, int64_t begin, int64_t count);

}  // namespace fusewire
