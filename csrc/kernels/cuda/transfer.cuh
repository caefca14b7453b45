// Between tensors and a buffer: the kernel behind pack and unpack. A Map says what becomes of an element: `In` is read,
// `Out` is written. Maps that are `kRare` take a plain loop: much code, unrolled, would cost compile time and
// registers.
#pragma once

#include "kernels/cuda/simt.cuh"
#include "kernels/cuda_kernels.h"

namespace fusewire::cuda {

template <class Map>
struct Transfer {
  const uint32_t* first_tiles;
  const Piece* pieces_at;
  const Layout* layouts;
  unsigned char* buffer;
  uint32_t pieces;
  uint32_t tiles;
  uint64_t identity;
  Map map;
};

// Accesses in flight per lane: 8 of 16 bytes. With 16 warps on a multiprocessor that is 64 KiB, more than twice what
// covers the latency of HBM3.
constexpr int kInFlight = 8;

template <class To, class From>
__device__ inline To low_bits(From bits) {
  static_assert(sizeof(To) <= sizeof(From), "narrows");
  To to;
  __builtin_memcpy(&to, &bits, sizeof(to));
  return to;
}

// Runs of memory on both sides, kCount elements per access.
template <int kCount, class Map>
__device__ inline void contiguous(const Map& map, const typename Map::In* in, typename Map::Out* out, uint32_t begin,
                                  uint32_t end) {
  using In = typename Map::In;
  using Out = typename Map::Out;
  const uint32_t vectors = (end - begin) / kCount;
  in += begin;
  out += begin;
  const auto convert = [&](const Vector<In, kCount>& from, uint32_t at) {
    Vector<Out, kCount> to;
#pragma unroll
    for (int i = 0; i < kCount; ++i) to.at[i] = map(from.at[i]);
    store_vector<Out, kCount>(out + at * kCount, to);
  };
  uint32_t v = lane_id();
  for (; v + (kInFlight - 1) * kWarpLanes < vectors; v += kInFlight * kWarpLanes) {
    Vector<In, kCount> from[kInFlight];
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) from[u] = load_vector<In, kCount>(in + (v + u * kWarpLanes) * kCount);
#pragma unroll
    for (int u = 0; u < kInFlight; ++u) convert(from[u], v + u * kWarpLanes);
  }
  for (; v < vectors; v += kWarpLanes) convert(load_vector<In, kCount>(in + v * kCount), v);
  for (uint32_t i = vectors * kCount + lane_id(); i < end - begin; i += kWarpLanes) out[i] = map(in[i]);
}

template <class Map>
__device__ inline void contiguous_plainly(const Map& map, const typename Map::In* in, typename Map::Out* out,
                                          uint32_t begin, uint32_t end) {
#pragma unroll 1
  for (uint32_t i = begin + lane_id(); i < end; i += kWarpLanes) out[i] = map(in[i]);
}

__device__ inline int64_t offset_of(const Layout& layout, uint32_t index) {
  int64_t offset = 0;
  for (int d = layout.dims - 1; d > 0; --d) {
    const uint32_t above = divide(index, layout.sizes[d]);
    offset += static_cast<int64_t>(index - above * layout.sizes[d].divisor) * layout.strides[d];
    index = above;
  }
  return offset + static_cast<int64_t>(index) * layout.strides[0];
}

template <class Map, bool kGather>
__device__ inline void strided(const Map& map, const Layout& layout, typename Map::Tensor* tensor,
                               typename Map::Buffer* buffer, uint32_t logical_begin, uint32_t begin, uint32_t end) {
  constexpr uint32_t kStridedInFlight = 4;
  using In = typename Map::In;
  const auto place = [&](uint32_t i) { return tensor + offset_of(layout, logical_begin + i); };
  uint32_t i = begin + lane_id();
  for (; !Map::kRare && i + (kStridedInFlight - 1) * kWarpLanes < end; i += kStridedInFlight * kWarpLanes) {
    In from[kStridedInFlight];
    if constexpr (kGather) {
#pragma unroll
      for (int u = 0; u < static_cast<int>(kStridedInFlight); ++u) from[u] = *place(i + u * kWarpLanes);
#pragma unroll
      for (int u = 0; u < static_cast<int>(kStridedInFlight); ++u) buffer[i + u * kWarpLanes] = map(from[u]);
    } else {
#pragma unroll
      for (int u = 0; u < static_cast<int>(kStridedInFlight); ++u) from[u] = buffer[i + u * kWarpLanes];
#pragma unroll
      for (int u = 0; u < static_cast<int>(kStridedInFlight); ++u) *place(i + u * kWarpLanes) = map(from[u]);
    }
  }
#pragma unroll 1
  for (; i < end; i += kWarpLanes) {
    if constexpr (kGather) {
      buffer[i] = map(*place(i));
    } else {
      *place(i) = map(buffer[i]);
    }
  }
}

template <class Map, bool kGather>
__global__ void __launch_bounds__(kThreads) transfer(Transfer<Map> params) {
  using In = typename Map::In;
  using Out = typename Map::Out;
  using Tensor = typename Map::Tensor;
  using Buffer = typename Map::Buffer;
  constexpr uint32_t kWidest = sizeof(In) > sizeof(Out) ? sizeof(In) : sizeof(Out);
  constexpr int kCount = static_cast<int>(kAccessBytes / kWidest);
  constexpr uint32_t kTile = kTileBytes / kWidest;

  const uint32_t tile = blockIdx.x * kWarpsPerBlock + warp_id();
  if (tile >= params.tiles) return;
  const uint32_t entry = find_entry(params.first_tiles, params.pieces, tile);
  const Piece piece = params.pieces_at[entry];
  // A piece has less than 2^31 elements, see TransferPlan.
  const uint32_t begin = (tile - params.first_tiles[entry]) * kTile;
  const uint32_t count = static_cast<uint32_t>(piece.count);
  const uint32_t end = count - begin < kTile ? count : begin + kTile;
  auto* tensor = reinterpret_cast<Tensor*>(piece.tensor);
  auto* buffer = reinterpret_cast<Buffer*>(params.buffer + piece.buffer);

  if (tensor == nullptr) {
    if constexpr (kGather) {
      const Out value = low_bits<Out>(params.identity);
      for (uint32_t i = begin + lane_id(); i < end; i += kWarpLanes) buffer[i] = value;
    }
    return;
  }
  if (piece.layout != 0) {
    return strided<Map, kGather>(params.map, params.layouts[piece.layout - 1], tensor, buffer, piece.begin, begin, end);
  }
  const bool aligned = aligned_to(tensor, kCount * sizeof(Tensor)) && aligned_to(buffer, kCount * sizeof(Buffer));
  const auto run = [&](const In* in, Out* out) {
    if constexpr (Map::kRare) {
      contiguous_plainly(params.map, in, out, begin, end);
    } else if (aligned) {
      contiguous<kCount>(params.map, in, out, begin, end);
    } else {
      contiguous<1>(params.map, in, out, begin, end);
    }
  };
  if constexpr (kGather) {
    run(tensor, buffer);
  } else {
    run(buffer, tensor);
  }
}

template <bool kGather, class Map>
int start(const TransferArgs& args, const Map& map) {
  if (args.tiles == 0) return 0;
  const auto* table = static_cast<const unsigned char*>(args.table);
  Transfer<Map> params;
  params.first_tiles = reinterpret_cast<const uint32_t*>(table);
  params.pieces_at = reinterpret_cast<const Piece*>(table + pieces_offset(args.pieces));
  params.layouts = reinterpret_cast<const Layout*>(table + layouts_offset(args.pieces));
  params.buffer = static_cast<unsigned char*>(args.buffer);
  params.pieces = args.pieces;
  params.tiles = args.tiles;
  params.identity = args.identity;
  params.map = map;
  return launch(transfer<Map, kGather>, blocks_for(args.tiles), params, args.stream);
}

// ---- maps ----

// Bytes as they are.
template <class Word>
struct Same {
  using In = Word;
  using Out = Word;
  using Tensor = Word;
  using Buffer = Word;
  static constexpr bool kRare = false;
  __device__ Word operator()(Word x) const { return x; }
};

template <bool kGather>
int start_same(const TransferArgs& args, uint32_t element_bytes) {
  switch (element_bytes) {
    case 1:
      return start<kGather>(args, Same<uint8_t>{});
    case 2:
      return start<kGather>(args, Same<uint16_t>{});
    case 4:
      return start<kGather>(args, Same<uint32_t>{});
    default:
      return start<kGather>(args, Same<uint64_t>{});
  }
}

// How a factor is applied; found on the host, once per launch.
enum class Scaling : uint8_t { kNone, kInFloat, kFull };

// Note [Scaling in fp32]
// element.h scales in fp64 (or, half types on their way back, in fp32) and rounds once. fp64 is slow on many GPUs, and
// often not needed:
// - fp32 times a number that is an fp32 number, to fp32: the fp32 product is the exact one rounded once, too.
// - half types times a power of two: fp32 holds the product exactly, or, where it does not (an overflow, or a bf16
//   below 2^-126), what it lost is beyond the second rounding's sight.
// - fp32 times a power of two, to fp16: the same; fp16 ends long before fp32 does. To bf16 it is not true: both end at
//   2^-126.
inline Scaling scaling_of(DataType from, DataType to, double factor, int64_t divisor) {
  if (factor == 1.0 && divisor == 1) return Scaling::kNone;
  const auto small = [](DataType type) { return type == DataType::kFloat16 || type == DataType::kBFloat16; };
  const double size = factor < 0 ? -factor : factor;
  if (divisor != 1 || !(size >= 0x1p-60 && size <= 0x1p60)) return Scaling::kFull;
  const bool is_float = static_cast<double>(static_cast<float>(factor)) == factor;
  const bool power_of_two = (element::bits_as<uint64_t>(factor) & 0xfffffffffffffu) == 0;
  if (from == DataType::kFloat32 && to == DataType::kFloat32 && is_float) return Scaling::kInFloat;
  if (power_of_two && small(from) && from == to) return Scaling::kInFloat;
  if (power_of_two && from == DataType::kFloat32 && to == DataType::kFloat16) return Scaling::kInFloat;
  return Scaling::kFull;
}

}  // namespace fusewire::cuda
