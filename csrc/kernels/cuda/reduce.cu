// The reduction of several buffers into one: the CPU's reduce() on device memory.
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/simt.cuh"
#include "kernels/dispatch.h"

namespace fusewire::cuda {
namespace {

struct Reduction {
  const void* sources[kMaxReduceSources];
  void* destination;
  uint64_t count;
  uint64_t tile;  // elements per warp, a multiple of what its lanes load at once
  double factor;
  int64_t divisor;
  int source_count;
  bool aligned;
};

// Two accesses per lane and source are in flight, and two sources at a time.
constexpr int kUnroll = 2;

// Floating types by kCount elements per access, everything else and the rest of a tile element by element.
template <class T, element::Combine kOp, int kCount>
__device__ inline void reduce_run(const Reduction& params, uint64_t begin, uint64_t end) {
  using Wide = typename element::Traits<T>::Wide;
  const auto source = [&](int s) { return static_cast<const T*>(params.sources[s]); };
  auto* const out = static_cast<T*>(params.destination);
  const auto plain = [&](uint64_t i) {
    const auto read = [&](int s) { return source(s)[i]; };
    return element::reduce_element<T, kOp>(read, params.source_count, params.factor, params.divisor);
  };
  constexpr uint64_t kStep = uint64_t{kWarpLanes} * kCount;
  uint64_t i = begin + uint64_t{lane_id()} * kCount;
  const bool in_float = sizeof(Wide) != sizeof(float) || element::fits_float(params.factor);
  for (; element::Traits<T>::kFloating && in_float && i + (kUnroll - 1) * kStep + kCount <= end; i += kUnroll * kStep) {
    if constexpr (element::Traits<T>::kFloating) {
      Wide acc[kUnroll][kCount];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const auto first = load_vector<T, kCount>(source(0) + i + u * kStep);
#pragma unroll
        for (int e = 0; e < kCount; ++e) acc[u][e] = element::Traits<T>::widen(first.at[e]);
      }
#pragma unroll 2
      for (int s = 1; s < params.source_count; ++s) {
        Vector<T, kCount> next[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) next[u] = load_vector<T, kCount>(source(s) + i + u * kStep);
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
          for (int e = 0; e < kCount; ++e) {
            acc[u][e] = element::combine<kOp>(acc[u][e], static_cast<Wide>(element::Traits<T>::widen(next[u].at[e])));
          }
        }
      }
      if (params.factor != 1.0 || params.divisor != 1) {
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
          for (int e = 0; e < kCount; ++e) {
            acc[u][e] = acc[u][e] * static_cast<Wide>(params.factor);
            if (params.divisor != 1) acc[u][e] = acc[u][e] / static_cast<Wide>(params.divisor);
          }
        }
      }
      if constexpr (kOp == element::Combine::kSum && element::Traits<T>::kRescue) {
        bool finite = true;
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
          for (int e = 0; e < kCount; ++e) finite = finite && element::is_finite(acc[u][e]);
        }
        if (!finite) {  // element.h: Note [Rescue]. Sources are read again, so nothing has been written yet.
#pragma unroll 1
          for (uint64_t at = i; at < i + kUnroll * kStep; at += kStep) {
#pragma unroll 1
            for (int e = 0; e < kCount; ++e) out[at + e] = plain(at + e);
          }
          continue;
        }
      }
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        Vector<T, kCount> result;
#pragma unroll
        for (int e = 0; e < kCount; ++e) result.at[e] = element::Convert<T>::from(acc[u][e]);
        store_vector<T, kCount>(out + i + u * kStep, result);
      }
    }
  }
#pragma unroll 1
  for (; i < end; i += kStep) {
#pragma unroll 1
    for (uint64_t e = i; e < i + kCount && e < end; ++e) out[e] = plain(e);
  }
}

template <class T, element::Combine kOp>
__global__ void __launch_bounds__(kThreads) reduce_kernel(Reduction params) {
  constexpr int kCount = static_cast<int>(kAccessBytes / sizeof(T));
  const uint64_t tile = uint64_t{blockIdx.x} * kWarpsPerBlock + warp_id();
  const uint64_t begin = tile * params.tile;
  if (begin >= params.count) return;
  const uint64_t end = params.count - begin < params.tile ? params.count : begin + params.tile;
  // Integers go one by one, which needs no alignment: nobody waits for them.
  if (params.aligned && element::Traits<T>::kFloating) {
    reduce_run<T, kOp, kCount>(params, begin, end);
  } else {
    reduce_run<T, kOp, 1>(params, begin, end);
  }
}

}  // namespace

int reduce(const DeviceReduceArgs& args) {
  if (args.source_count < 1 || args.source_count > kMaxReduceSources) return kInvalidValue;
  if (args.count == 0) return 0;
  Reduction params;
  params.aligned = reinterpret_cast<uintptr_t>(args.destination) % kAccessBytes == 0;
  for (int s = 0; s < args.source_count; ++s) {
    params.sources[s] = args.sources[s];
    params.aligned = params.aligned && reinterpret_cast<uintptr_t>(args.sources[s]) % kAccessBytes == 0;
  }
  params.destination = args.destination;
  params.factor = args.factor;
  params.divisor = args.divisor;
  params.source_count = args.source_count;
  int error = kInvalidValue;
  element::visit_type(args.dtype, [&](auto tag, int parts) {
    element::visit_op(args.op, [&](auto op) {
      using T = typename decltype(tag)::Type;
      constexpr element::Combine kOp = decltype(op)::kCombine;
      if constexpr (element::Traits<T>::kFloating) divide_by_multiplying(&params.factor, &params.divisor);
      params.count = args.count * static_cast<uint64_t>(parts);
      params.tile = tile_elements(sizeof(T));
      error = launch(reduce_kernel<T, kOp>, blocks_for((params.count + params.tile - 1) / params.tile), params,
                     args.stream);
    });
  });
  return error;
}

}  // namespace fusewire::cuda
