// Internal to this folder: the launchers, one .cu file each, and what they share on the host.
#pragma once

#include "kernels/cuda_kernels.h"

namespace fusewire::cuda {

int pack(const TransferArgs& args);
int unpack(const TransferArgs& args);
int reduce(const DeviceReduceArgs& args);
int dot(const DeviceDotArgs& args);
int combine(const DeviceCombineArgs& args);
int quantise(const DeviceQuantiseArgs& args);
int dequantise(const DeviceDequantiseArgs& args);

// A complex number is two real ones.
constexpr DataType real_type(DataType type) {
  if (type == DataType::kComplex64) return DataType::kFloat32;
  return type == DataType::kComplex128 ? DataType::kFloat64 : type;
}

// Of a real type.
constexpr uint32_t element_bytes(DataType type) {
  switch (type) {
    case DataType::kUInt8:
    case DataType::kInt8:
    case DataType::kBool:
      return 1;
    case DataType::kUInt16:
    case DataType::kInt16:
    case DataType::kFloat16:
    case DataType::kBFloat16:
      return 2;
    case DataType::kUInt32:
    case DataType::kInt32:
    case DataType::kFloat32:
      return 4;
    default:
      return 8;
  }
}

// x / 2^k is x * 2^-k for every floating x.
inline void divide_by_multiplying(double* factor, int64_t* divisor) {
  if (*factor != 1.0 || *divisor <= 0 || (*divisor & (*divisor - 1)) != 0) return;
  *factor = 1.0 / static_cast<double>(*divisor);
  *divisor = 1;
}

}  // namespace fusewire::cuda
