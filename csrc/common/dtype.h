// The codes of element types and reduction operators. Plain C++17, so that device code may include it.
#pragma once

#include <stdint.h>

namespace fusewire {

enum class DataType : uint8_t {
  kUInt8,
  kInt8,
  kUInt16,
  kInt16,
  kUInt32,
  kInt32,
  kUInt64,
  kInt64,
  kFloat16,
  kBFloat16,
  kFloat32,
  kFloat64,
  kBool,
  kComplex64,
  kComplex128,
};
inline constexpr int kDataTypeCount = 15;

// kAdasum (arXiv 2006.02924) has a meaning for floating-point allreduce only: its coefficients belong to a whole
// tensor.
enum class ReduceOp : uint8_t { kSum, kAverage, kMin, kMax, kProduct, kAdasum };
inline constexpr int kReduceOpCount = 6;

}  // namespace fusewire
