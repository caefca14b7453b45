// Eight bits per value and one scale per block of values, with the same rounding as the int8 compressor in Python.
// One warp per block: with 256 values, eight per lane.
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/simt.cuh"
#include "kernels/dispatch.h"

namespace fusewire::cuda {
namespace {

constexpr float kLevels = 127.0f;

struct Quantisation {
  const void* values;
  uint64_t count;
  uint64_t blocks;
  uint32_t block;
  const void* error_in;
  void* error_out;
  int8_t* quantised;
  float* scales;
};

// A NaN on either side wins, as in a maximum of torch.
template <class W>
__device__ inline W larger(W a, W b) {
  return b > a || b != b ? b : a;
}

// To the nearest integer, ties to even, for any |x| below 2^22: adding 1.5 * 2^23 leaves no bit behind the point.
__device__ inline float round_even(float x) { return (x + 12582912.0f) - 12582912.0f; }
__device__ inline double round_even(double x) { return (x + 6755399441055744.0) - 6755399441055744.0; }

template <class T>
__global__ void __launch_bounds__(kThreads) quantise_kernel(Quantisation params) {
  using W = element::Conditional<element::is_same<T, double>, double, float>;
  const uint64_t block = uint64_t{blockIdx.x} * kWarpsPerBlock + warp_id();
  if (block >= params.blocks) return;
  const uint64_t begin = block * params.block;
  const uint64_t left = params.count - begin;
  const uint32_t size = left < params.block ? static_cast<uint32_t>(left) : params.block;
  const T* values = static_cast<const T*>(params.values) + begin;
  const auto* error_in = static_cast<const W*>(params.error_in);
  auto* error_out = static_cast<W*>(params.error_out);
  const auto value = [&](uint32_t i) {
    const W x = element::Convert<W>::from(element::Traits<T>::widen(values[i]));
    return error_in == nullptr ? x : x + error_in[begin + i];
  };

  W largest = 0;
#pragma unroll 8
  for (uint32_t i = lane_id(); i < size; i += kWarpLanes) {
    const W x = value(i);
    largest = larger(largest, x < 0 ? -x : x);
  }
  for (int mask = static_cast<int>(kWarpLanes) / 2; mask > 0; mask /= 2) {
    largest = larger(largest, __shfl_xor_sync(kAllLanes, largest, mask));
  }
  const float scale = static_cast<float>(largest / static_cast<W>(kLevels));
  const W divisor = scale == 0.0f ? static_cast<W>(1) : static_cast<W>(scale);
  // The second pass finds the values in the innermost cache. Not unrolled: registers would be spilled around the
  // divisions' slow paths.
#pragma unroll 1
  for (uint32_t i = lane_id(); i < params.block; i += kWarpLanes) {
    W level = 0;
    if (i < size) {
      const W x = value(i);
      W ratio = x / divisor;
      ratio = ratio > kLevels ? static_cast<W>(kLevels) : ratio < -kLevels ? static_cast<W>(-kLevels) : ratio;
      level = ratio != ratio ? static_cast<W>(0) : round_even(ratio);
      if (error_out != nullptr) error_out[begin + i] = x - level * static_cast<W>(scale);
    }
    params.quantised[begin + i] = static_cast<int8_t>(level);
  }
  if (lane_id() == 0) params.scales[block] = scale;
}

template <class W>
__global__ void __launch_bounds__(kThreads) dequantise_kernel(DeviceDequantiseArgs params) {
  const uint64_t blocks = (params.count + params.block - 1) / params.block;
  const uint64_t block = uint64_t{blockIdx.x} * kWarpsPerBlock + warp_id();
  if (block >= blocks) return;
  const uint64_t begin = block * params.block;
  const uint64_t left = params.count - begin;
  const uint32_t size = left < params.block ? static_cast<uint32_t>(left) : params.block;
  W* total = static_cast<W*>(params.total) + begin;
#pragma unroll 4
  for (uint32_t i = lane_id(); i < size; i += kWarpLanes) {
    W sum = params.overwrite ? static_cast<W>(0) : total[i];
    for (uint32_t p = 0; p < params.payloads; ++p) {
      const uint64_t at = uint64_t{p} * blocks + block;
      sum += static_cast<W>(params.quantised[at * params.block + i]) * static_cast<W>(params.scales[at]);
    }
    total[i] = sum * static_cast<W>(params.factor);
  }
}

}  // namespace

int quantise(const DeviceQuantiseArgs& args) {
  if (args.block == 0) return kInvalidValue;
  if (args.count == 0) return 0;
  Quantisation params;
  params.values = args.values;
  params.count = args.count;
  params.block = args.block;
  params.blocks = (args.count + args.block - 1) / args.block;
  params.error_in = args.error_in;
  params.error_out = args.error_out;
  params.quantised = args.quantised;
  params.scales = args.scales;
  int error = kInvalidValue;
  switch (args.dtype) {
    case DataType::kFloat16:
    case DataType::kBFloat16:
    case DataType::kFloat32:
    case DataType::kFloat64:
      element::visit_floating(args.dtype, [&](auto tag) {
        error = launch(quantise_kernel<typename decltype(tag)::Type>, blocks_for(params.blocks), params, args.stream);
      });
      return error;
    default:
      return error;
  }
}

int dequantise(const DeviceDequantiseArgs& args) {
  if (args.block == 0) return kInvalidValue;
  if (args.count == 0) return 0;
  const uint32_t grid = blocks_for((args.count + args.block - 1) / args.block);
  if (args.dtype == DataType::kFloat32) return launch(dequantise_kernel<float>, grid, args, args.stream);
  if (args.dtype == DataType::kFloat64) return launch(dequantise_kernel<double>, grid, args, args.stream);
  return kInvalidValue;
}

}  // namespace fusewire::cuda
