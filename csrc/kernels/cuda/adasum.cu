// Adasum's two steps on the device: all dot products of a bucket's tensors in one launch, then the linear combinations.
//
// Note [Dot products in one launch]
// Each warp sums its tile in fp64. The warps of a block add up what belongs to the same span, in order, and the block
// publishes one partial sum per span it has met. The block that publishes a span's last one (an integer counter tells)
// adds them all, again in an order that depends on the sizes alone. So no floating-point atomic is used, the result is
// the same in every run, and a span inside one block needs neither counter nor fence.
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/simt.cuh"
#include "kernels/dispatch.h"

namespace fusewire::cuda {
namespace {

constexpr uint32_t kNoSpan = 0xffffffffu;

const Span* spans_of(const void* table, uint32_t spans) {
  return reinterpret_cast<const Span*>(static_cast<const unsigned char*>(table) + pieces_offset(spans));
}

struct Dot {
  const uint32_t* first_tiles;
  const Span* spans_at;
  uint32_t spans;
  uint32_t tiles;
  const void* sources[kMaxDotSources];
  double* dots;
  double* partials;
  uint32_t* arrivals;
  bool aligned;
};

template <int kSources>
__device__ inline void add_products(const double* x, double* sums) {
  int pair = 0;
#pragma unroll
  for (int i = 0; i < kSources; ++i) {
#pragma unroll
    for (int j = i; j < kSources; ++j) sums[pair++] += x[i] * x[j];
  }
}

// One lane's share of elements [begin, end).
template <class T, int kSources, int kCount>
__device__ inline void sum_tile(const Dot& params, uint64_t begin, uint64_t end, double* sums) {
  constexpr int kUnroll = kSources == 2 ? 4 : 2;  // 8 or 6 accesses in flight
  constexpr uint64_t kStep = uint64_t{kWarpLanes} * kCount;
  const auto source = [&](int s) { return static_cast<const T*>(params.sources[s]); };
  uint64_t i = begin + uint64_t{lane_id()} * kCount;
  for (; i + (kUnroll - 1) * kStep + kCount <= end; i += kUnroll * kStep) {
    Vector<T, kCount> from[kUnroll][kSources];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int s = 0; s < kSources; ++s) from[u][s] = load_vector<T, kCount>(source(s) + i + u * kStep);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        double x[kSources];
#pragma unroll
        for (int s = 0; s < kSources; ++s) x[s] = element::to_double(from[u][s].at[e]);
        add_products<kSources>(x, sums);
      }
    }
  }
#pragma unroll 1
  for (; i < end; i += kStep) {
#pragma unroll 1
    for (uint64_t e = i; e < i + kCount && e < end; ++e) {
      double x[kSources];
#pragma unroll
      for (int s = 0; s < kSources; ++s) x[s] = element::to_double(source(s)[e]);
      add_products<kSources>(x, sums);
    }
  }
}

// The whole block adds a span's partial sums and stores its dot products.
template <int kPairs>
__device__ inline void finish_span(const Dot& params, uint32_t span, double (*scratch)[kPairs]) {
  const Span at = params.spans_at[span];
  double sums[kPairs] = {};
  for (uint32_t slot = threadIdx.x; slot < at.slots; slot += kThreads) {
    const double* partial = params.partials + uint64_t{at.first_slot + slot} * kPairs;
#pragma unroll
    for (int p = 0; p < kPairs; ++p) sums[p] += partial[p];
  }
#pragma unroll
  for (int p = 0; p < kPairs; ++p) sums[p] = warp_sum(sums[p]);
  __syncthreads();  // nobody reads scratch any more
  if (lane_id() == 0) {
#pragma unroll
    for (int p = 0; p < kPairs; ++p) scratch[warp_id()][p] = sums[p];
  }
  __syncthreads();
  if (threadIdx.x < kPairs) {
    double sum = scratch[0][threadIdx.x];
    for (uint32_t w = 1; w < kWarpsPerBlock; ++w) sum += scratch[w][threadIdx.x];
    params.dots[uint64_t{span} * kPairs + threadIdx.x] = sum;
  }
}

template <class T, int kSources>
__global__ void __launch_bounds__(kThreads) dot_kernel(Dot params) {
  constexpr int kPairs = kDotPairs<kSources>;
  constexpr int kCount = static_cast<int>(kAccessBytes / sizeof(T));
  constexpr uint64_t kTile = uint64_t{kDotRounds} * kWarpLanes * kCount;
  __shared__ double sums_of[kWarpsPerBlock][kPairs];
  __shared__ uint32_t span_of[kWarpsPerBlock];
  __shared__ uint32_t to_finish[kWarpsPerBlock];

  const uint32_t warp = warp_id();
  const uint32_t tile = blockIdx.x * kWarpsPerBlock + warp;
  uint32_t span = kNoSpan;
  double sums[kPairs] = {};
  if (tile < params.tiles) {
    span = find_entry(params.first_tiles, params.spans, tile);
    const Span at = params.spans_at[span];
    const uint64_t begin = at.begin + uint64_t{tile - params.first_tiles[span]} * kTile;
    const uint64_t last = at.begin + at.count;
    const uint64_t end = last - begin < kTile ? last : begin + kTile;
    if (params.aligned && begin % kCount == 0) {
      sum_tile<T, kSources, kCount>(params, begin, end, sums);
    } else {
      sum_tile<T, kSources, 1>(params, begin, end, sums);
    }
#pragma unroll
    for (int p = 0; p < kPairs; ++p) sums[p] = warp_sum(sums[p]);
  }
  if (lane_id() == 0) {
    span_of[warp] = span;
    to_finish[warp] = kNoSpan;
#pragma unroll
    for (int p = 0; p < kPairs; ++p) sums_of[warp][p] = sums[p];
  }
  __syncthreads();

  // The first warp of each span in this block speaks for all of them.
  if (lane_id() == 0 && span != kNoSpan && (warp == 0 || span_of[warp - 1] != span)) {
    for (uint32_t w = warp + 1; w < kWarpsPerBlock && span_of[w] == span; ++w) {
#pragma unroll
      for (int p = 0; p < kPairs; ++p) sums[p] += sums_of[w][p];
    }
    const Span at = params.spans_at[span];
    double* const to =
        at.slots == 1 ? params.dots + uint64_t{span} * kPairs
                      : params.partials +
                            uint64_t{at.first_slot + blockIdx.x - params.first_tiles[span] / kWarpsPerBlock} * kPairs;
#pragma unroll
    for (int p = 0; p < kPairs; ++p) to[p] = sums[p];
    if (at.slots > 1) {
      __threadfence();  // the partial sums are there before the arrival is
      if (atomicAdd(&params.arrivals[span], 1u) == at.slots - 1) {
        __threadfence();  // others' arrivals have been seen: so will their partial sums be
        to_finish[warp] = span;
        params.arrivals[span] = 0;  // for the next launch
      }
    }
  }
  if (__syncthreads_or(lane_id() == 0 && to_finish[warp] != kNoSpan) == 0) return;
  __threadfence();  // of this thread: no line that was cached before those sums were written
  for (uint32_t w = 0; w < kWarpsPerBlock; ++w) {
    if (to_finish[w] != kNoSpan) finish_span<kPairs>(params, to_finish[w], sums_of);
  }
}

struct Combination {
  const uint32_t* first_tiles;
  const Span* spans_at;
  uint32_t spans;
  uint32_t tiles;
  const void* sources[kMaxCombineSources];
  int source_count;
  const double* coefficients;
  const double* dots;
  void* destination;
  double factor;
  bool aligned;
};

// Adasum's coefficient of a vector (arXiv 2006.02924, equation 4): 1 - <a, b> / (2 <a, a>), and 1 for a zero vector.
__device__ inline double adasum_coefficient(double dot, double norm) {
  return norm == 0 ? 1.0 : 1.0 - dot / (2.0 * norm);
}

template <class T, int kCount>
__device__ inline void combine_tile(const Combination& params, const double* coefficients, uint64_t begin,
                                    uint64_t end) {
  constexpr int kUnroll = 2;
  constexpr uint64_t kStep = uint64_t{kWarpLanes} * kCount;
  const auto source = [&](int s) { return static_cast<const T*>(params.sources[s]); };
  auto* const out = static_cast<T*>(params.destination);
  uint64_t i = begin + uint64_t{lane_id()} * kCount;
  for (; i + (kUnroll - 1) * kStep + kCount <= end; i += kUnroll * kStep) {
    double sums[kUnroll][kCount];
    const auto add = [&](int s) {
      Vector<T, kCount> from[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) from[u] = load_vector<T, kCount>(source(s) + i + u * kStep);
      const double by = coefficients[s];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
        for (int e = 0; e < kCount; ++e) {
          const double x = element::to_double(from[u].at[e]) * by;
          sums[u][e] = s == 0 ? x : sums[u][e] + x;
        }
      }
    };
    add(0);
#pragma unroll 2
    for (int s = 1; s < params.source_count; ++s) add(s);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      Vector<T, kCount> result;
#pragma unroll
      for (int e = 0; e < kCount; ++e) result.at[e] = element::Convert<T>::from(sums[u][e] * params.factor);
      store_vector<T, kCount>(out + i + u * kStep, result);
    }
  }
#pragma unroll 1
  for (; i < end; i += kStep) {
#pragma unroll 1
    for (uint64_t e = i; e < i + kCount && e < end; ++e) {
      double sum = element::to_double(source(0)[e]) * coefficients[0];
      for (int s = 1; s < params.source_count; ++s) sum += element::to_double(source(s)[e]) * coefficients[s];
      out[e] = element::Convert<T>::from(sum * params.factor);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads) combine_kernel(Combination params) {
  constexpr int kCount = static_cast<int>(kAccessBytes / sizeof(T));
  constexpr uint64_t kTile = uint64_t{kDotRounds} * kWarpLanes * kCount;
  const uint32_t tile = blockIdx.x * kWarpsPerBlock + warp_id();
  if (tile >= params.tiles) return;
  const uint32_t span = find_entry(params.first_tiles, params.spans, tile);
  const Span at = params.spans_at[span];
  const uint64_t begin = at.begin + uint64_t{tile - params.first_tiles[span]} * kTile;
  const uint64_t last = at.begin + at.count;
  const uint64_t end = last - begin < kTile ? last : begin + kTile;
  double own[2];
  const double* coefficients = own;
  if (params.coefficients != nullptr) {
    coefficients = params.coefficients + uint64_t{span} * static_cast<uint32_t>(params.source_count);
  } else {
    const double* dots = params.dots + uint64_t{span} * kDotPairs<2>;
    own[0] = adasum_coefficient(dots[1], dots[0]);
    own[1] = adasum_coefficient(dots[1], dots[2]);
  }
  if (params.aligned && begin % kCount == 0) {
    combine_tile<T, kCount>(params, coefficients, begin, end);
  } else {
    combine_tile<T, 1>(params, coefficients, begin, end);
  }
}

template <int kSources, class T>
int start_dot(const DeviceDotArgs& args, const Dot& params) {
  return launch(dot_kernel<T, kSources>, blocks_for(args.tiles), params, args.stream);
}

bool is_floating(DataType type) {
  return type == DataType::kFloat16 || type == DataType::kBFloat16 || type == DataType::kFloat32 ||
         type == DataType::kFloat64;
}

bool access_aligned(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % kAccessBytes == 0; }

}  // namespace

int dot(const DeviceDotArgs& args) {
  if (args.source_count < 2 || args.source_count > kMaxDotSources || !is_floating(args.dtype)) return kInvalidValue;
  if (args.tiles == 0) return 0;
  Dot params = {};
  params.first_tiles = static_cast<const uint32_t*>(args.table);
  params.spans_at = spans_of(args.table, args.spans);
  params.spans = args.spans;
  params.tiles = args.tiles;
  params.dots = args.dots;
  params.partials = args.partials;
  params.arrivals = args.arrivals;
  params.aligned = true;
  for (int s = 0; s < args.source_count; ++s) {
    params.sources[s] = args.sources[s];
    params.aligned = params.aligned && access_aligned(args.sources[s]);
  }
  int error = kInvalidValue;
  element::visit_floating(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    if (args.source_count == 2) error = start_dot<2, T>(args, params);
    if (args.source_count == 3) error = start_dot<3, T>(args, params);
    if (args.source_count == 4) error = start_dot<4, T>(args, params);
  });
  return error;
}

int combine(const DeviceCombineArgs& args) {
  const bool pair = args.source_count == 2 && args.dots != nullptr;
  if (args.source_count < 1 || args.source_count > kMaxCombineSources || !is_floating(args.dtype) ||
      (args.coefficients == nullptr && !pair)) {
    return kInvalidValue;
  }
  if (args.tiles == 0) return 0;
  Combination params = {};
  params.first_tiles = static_cast<const uint32_t*>(args.table);
  params.spans_at = spans_of(args.table, args.spans);
  params.spans = args.spans;
  params.tiles = args.tiles;
  params.source_count = args.source_count;
  params.coefficients = args.coefficients;
  params.dots = args.dots;
  params.destination = args.destination;
  params.factor = args.factor;
  params.aligned = access_aligned(args.destination);
  for (int s = 0; s < args.source_count; ++s) {
    params.sources[s] = args.sources[s];
    params.aligned = params.aligned && access_aligned(args.sources[s]);
  }
  int error = kInvalidValue;
  element::visit_floating(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    error = launch(combine_kernel<T>, blocks_for(args.tiles), params, args.stream);
  });
  return error;
}

}  // namespace fusewire::cuda
