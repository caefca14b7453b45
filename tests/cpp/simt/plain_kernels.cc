#include "simt/plain_kernels.h"

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "kernels/cuda_tables.h"
#include "kernels/dispatch.h"
#include "kernels/element.h"
#include "simt/stand_in.h"

namespace fusewire::testing {
namespace {

constexpr int kInvalidValue = 1;  // cudaErrorInvalidValue

int done() {
  simt::count_launch();
  return 0;
}

bool floating(DataType type) {
  return type == DataType::kFloat16 || type == DataType::kBFloat16 || type == DataType::kFloat32 ||
         type == DataType::kFloat64;
}

const unsigned char* bytes_of(const void* memory) { return static_cast<const unsigned char*>(memory); }

// ---- pack and unpack ----

int64_t offset_of(const cuda::Layout& layout, uint64_t index) {
  int64_t offset = 0;
  for (int d = layout.dims - 1; d >= 0; --d) {
    const uint64_t size = layout.sizes[d].divisor;
    offset += static_cast<int64_t>(d == 0 ? index : index % size) * layout.strides[d];
    index /= size;
  }
  return offset;
}

// visit(element of the tensor, or null; element of the buffer) for all of a table.
template <class Tensor, class Buffer, class Visit>
int for_each(const TransferArgs& args, Visit visit) {
  const auto* pieces = reinterpret_cast<const cuda::Piece*>(bytes_of(args.table) + cuda::pieces_offset(args.pieces));
  const auto* layouts = reinterpret_cast<const cuda::Layout*>(bytes_of(args.table) + cuda::layouts_offset(args.pieces));
  for (uint32_t p = 0; p < args.pieces; ++p) {
    const cuda::Piece& piece = pieces[p];
    auto* const tensor = reinterpret_cast<Tensor*>(piece.tensor);
    auto* const buffer = reinterpret_cast<Buffer*>(static_cast<unsigned char*>(args.buffer) + piece.buffer);
    for (uint64_t i = 0; i < piece.count; ++i) {
      Tensor* at = tensor;
      if (tensor != nullptr && piece.layout == 0) at = tensor + i;
      if (tensor != nullptr && piece.layout != 0) at = tensor + offset_of(layouts[piece.layout - 1], piece.begin + i);
      visit(at, buffer + i);
    }
  }
  return args.tiles == 0 ? 0 : done();
}

template <class Tensor, class Buffer, class Map>
int gather(const TransferArgs& args, Map map) {
  return for_each<Tensor, Buffer>(args, [&](const Tensor* from, Buffer* to) {
    if (from != nullptr) {
      *to = map(*from);
    } else {
      std::memcpy(to, &args.identity, sizeof(*to));
    }
  });
}

template <class Tensor, class Buffer, class Map>
int scatter(const TransferArgs& args, Map map) {
  return for_each<Tensor, Buffer>(args, [&](Tensor* to, const Buffer* from) {
    if (to != nullptr) *to = map(*from);
  });
}

// Complex numbers are two real ones, in tables too.
TransferArgs in_real_types(TransferArgs args) {
  const auto real = [](DataType type) {
    if (type == DataType::kComplex64) return DataType::kFloat32;
    return type == DataType::kComplex128 ? DataType::kFloat64 : type;
  };
  args.dtype = real(args.dtype);
  args.wire = real(args.wire);
  return args;
}

int pack(const TransferArgs& given) {
  const TransferArgs args = in_real_types(given);
  int error = kInvalidValue;
  if (args.dtype == args.wire && args.factor == 1.0) {
    element::visit_type(args.dtype, [&](auto tag, int) {
      using T = typename decltype(tag)::Type;
      error = gather<T, T>(args, [](T x) { return x; });
    });
    return error;
  }
  if (!floating(args.dtype) || !floating(args.wire)) return error;
  element::visit_floating(args.dtype, [&](auto from) {
    element::visit_floating(args.wire, [&](auto to) {
      using From = typename decltype(from)::Type;
      using To = typename decltype(to)::Type;
      if constexpr (sizeof(To) < sizeof(From) || std::is_same_v<To, From>) {
        error = gather<From, To>(args, [&](From x) { return element::cast_element<From, To>(x, args.factor); });
      }
    });
  });
  return error;
}

int unpack(const TransferArgs& given) {
  const TransferArgs args = in_real_types(given);
  const bool scaled = args.factor != 1.0 || args.divisor != 1;
  int error = kInvalidValue;
  if (args.dtype == args.wire) {
    element::visit_type(args.dtype, [&](auto tag, int) {
      using T = typename decltype(tag)::Type;
      error = scatter<T, T>(args, [&](T x) {
        if (!scaled || args.dtype == DataType::kBool) return x;
        return element::reduce_element<T, element::Combine::kSum>([x](int) { return x; }, 1, args.factor, args.divisor);
      });
    });
    return error;
  }
  if (!floating(args.dtype) || !floating(args.wire)) return error;
  element::visit_floating(args.dtype, [&](auto to) {
    element::visit_floating(args.wire, [&](auto from) {
      using From = typename decltype(from)::Type;
      using To = typename decltype(to)::Type;
      if constexpr (sizeof(From) < sizeof(To)) {
        error = scatter<To, From>(args, [&](From x) {
          if (!scaled) return element::Convert<To>::from(element::Traits<From>::widen(x));
          return element::Convert<To>::from(element::to_double(x) * args.factor / static_cast<double>(args.divisor));
        });
      }
    });
  });
  return error;
}

int reduce(const DeviceReduceArgs& args) {
  if (args.source_count < 1 || args.source_count > kMaxReduceSources) return kInvalidValue;
  if (args.count == 0) return 0;
  element::visit_type(args.dtype, [&](auto tag, int parts) {
    element::visit_op(args.op, [&](auto op) {
      using T = typename decltype(tag)::Type;
      for (uint64_t i = 0; i < args.count * static_cast<uint64_t>(parts); ++i) {
        const element::ReadAt<T> read{args.sources, i};
        element::store(
            args.destination, i,
            element::reduce_element<T, decltype(op)::kCombine>(read, args.source_count, args.factor, args.divisor));
      }
    });
  });
  return done();
}

// ---- Adasum ----

// One sum per pair of sources.
using Sums = std::vector<double>;

void add(Sums& to, const Sums& sums) {
  for (size_t p = 0; p < to.size(); ++p) to[p] += sums[p];
}

// As a warp adds its lanes: the upper half to the lower one until one is left.
Sums fold(std::vector<Sums> lanes) {
  for (size_t half = lanes.size() / 2; half > 0; half /= 2) {
    for (size_t lane = 0; lane < half; ++lane) add(lanes[lane], lanes[lane + half]);
  }
  return lanes.front();
}

struct Tables {
  Tables(const void* table, uint32_t spans)
      : first_tiles(static_cast<const uint32_t*>(table)),
        at(reinterpret_cast<const cuda::Span*>(bytes_of(table) + cuda::pieces_offset(spans))) {}
  const uint32_t* first_tiles;
  const cuda::Span* at;
};

template <class T>
class Dots {
 public:
  explicit Dots(const DeviceDotArgs& args)
      : args_(args), pairs_(static_cast<size_t>(args.source_count * (args.source_count + 1) / 2)) {
    for (int s = 0; s < args.source_count; ++s) {
      aligned_ = aligned_ && reinterpret_cast<uintptr_t>(args.sources[s]) % cuda::kAccessBytes == 0;
    }
  }

  void run() const {
    const Tables tables(args_.table, args_.spans);
    for (uint32_t s = 0; s < args_.spans; ++s) {
      const uint32_t first = tables.first_tiles[s];
      const uint32_t last = tables.first_tiles[s + 1];
      if (first == last) continue;
      std::vector<Sums> slots;  // one per block, each of its warps in order
      for (uint32_t tile = first; tile < last; ++tile) {
        const Sums sums = of_tile(tables.at[s], tile - first);
        if (tile == first || tile % cuda::kWarpsPerBlock == 0) {
          slots.push_back(sums);
        } else {
          add(slots.back(), sums);
        }
      }
      const Sums sums = slots.size() == 1 ? slots.front() : of_slots(slots);
      std::copy(sums.begin(), sums.end(), args_.dots + s * pairs_);
    }
  }

 private:
  static constexpr uint64_t kCount = cuda::kAccessBytes / sizeof(T);
  static constexpr uint64_t kTile = uint64_t{cuda::kDotRounds} * cuda::kWarpLanes * kCount;

  Sums of_tile(const cuda::Span& span, uint32_t tile) const {
    const uint64_t begin = span.begin + tile * kTile;
    const uint64_t end = std::min(begin + kTile, span.begin + span.count);
    const uint64_t together = aligned_ && begin % kCount == 0 ? kCount : 1;
    std::vector<Sums> lanes(cuda::kWarpLanes, Sums(pairs_));
    for (uint64_t i = begin; i < end; ++i) {
      Sums& sums = lanes[(i - begin) / together % cuda::kWarpLanes];
      size_t pair = 0;
      for (int a = 0; a < args_.source_count; ++a) {
        for (int b = a; b < args_.source_count; ++b) sums[pair++] += value(a, i) * value(b, i);
      }
    }
    return fold(std::move(lanes));
  }

  // As a block does it: every thread some, the warps fold, the first warp's first.
  Sums of_slots(const std::vector<Sums>& slots) const {
    std::vector<std::vector<Sums>> warps(cuda::kWarpsPerBlock, std::vector<Sums>(cuda::kWarpLanes, Sums(pairs_)));
    for (size_t slot = 0; slot < slots.size(); ++slot) {
      const size_t thread = slot % (cuda::kWarpsPerBlock * cuda::kWarpLanes);
      add(warps[thread / cuda::kWarpLanes][thread % cuda::kWarpLanes], slots[slot]);
    }
    Sums sums = fold(warps.front());
    for (size_t w = 1; w < warps.size(); ++w) add(sums, fold(warps[w]));
    return sums;
  }

  double value(int source, uint64_t i) const { return element::to_double(element::load<T>(args_.sources[source], i)); }

  const DeviceDotArgs& args_;
  size_t pairs_;
  bool aligned_ = true;
};

int dot(const DeviceDotArgs& args) {
  if (args.source_count < 2 || args.source_count > kMaxDotSources || !floating(args.dtype)) return kInvalidValue;
  if (args.tiles == 0) return 0;
  element::visit_floating(args.dtype, [&](auto tag) { Dots<typename decltype(tag)::Type>(args).run(); });
  return done();
}

int combine(const DeviceCombineArgs& args) {
  const bool pair = args.source_count == 2 && args.dots != nullptr;
  if (args.source_count < 1 || args.source_count > kMaxCombineSources || !floating(args.dtype) ||
      (args.coefficients == nullptr && !pair)) {
    return kInvalidValue;
  }
  if (args.tiles == 0) return 0;
  const Tables tables(args.table, args.spans);
  element::visit_floating(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    for (uint32_t s = 0; s < args.spans; ++s) {
      double own[2];
      const double* by = own;
      if (args.coefficients != nullptr) {
        by = args.coefficients + size_t{s} * static_cast<size_t>(args.source_count);
      } else {
        const double* dots = args.dots + size_t{s} * 3;
        own[0] = dots[0] == 0 ? 1.0 : 1.0 - dots[1] / (2.0 * dots[0]);
        own[1] = dots[2] == 0 ? 1.0 : 1.0 - dots[1] / (2.0 * dots[2]);
      }
      const cuda::Span& span = tables.at[s];
      for (uint64_t i = span.begin; i < span.begin + span.count; ++i) {
        double sum = 0;
        for (int source = 0; source < args.source_count; ++source) {
          const double term = element::to_double(element::load<T>(args.sources[source], i)) * by[source];
          sum = source == 0 ? term : sum + term;
        }
        element::store(args.destination, i, element::Convert<T>::from(sum * args.factor));
      }
    }
  });
  return done();
}

// ---- int8 ----

template <class T>
void quantise_blocks(const DeviceQuantiseArgs& args) {
  using W = std::conditional_t<std::is_same_v<T, double>, double, float>;
  const auto value = [&](uint64_t i) {
    const W x = element::Convert<W>::from(element::Traits<T>::widen(element::load<T>(args.values, i)));
    return args.error_in == nullptr ? x : x + element::load<W>(args.error_in, i);
  };
  const W levels = 127;
  const W shift = sizeof(W) == sizeof(float) ? static_cast<W>(12582912.0) : static_cast<W>(6755399441055744.0);
  for (uint64_t begin = 0; begin < args.count; begin += args.block) {
    const uint64_t end = std::min(begin + args.block, args.count);
    W largest = 0;
    for (uint64_t i = begin; i < end; ++i) {
      const W size = value(i) < 0 ? -value(i) : value(i);
      if (size > largest || size != size) largest = size;
    }
    const float scale = static_cast<float>(largest / levels);
    const W divisor = scale == 0.0f ? static_cast<W>(1) : static_cast<W>(scale);
    for (uint64_t i = begin; i < begin + args.block; ++i) {
      W level = 0;
      if (i < end) {
        const W x = value(i);
        const W ratio = x / divisor;
        level = ratio != ratio ? 0 : (std::clamp(ratio, -levels, levels) + shift) - shift;
        if (args.error_out != nullptr) element::store<W>(args.error_out, i, x - level * static_cast<W>(scale));
      }
      args.quantised[i] = static_cast<int8_t>(level);
    }
    args.scales[begin / args.block] = scale;
  }
}

int quantise(const DeviceQuantiseArgs& args) {
  if (args.block == 0) return kInvalidValue;
  if (args.count == 0) return 0;
  if (!floating(args.dtype)) return kInvalidValue;
  element::visit_floating(args.dtype, [&](auto tag) { quantise_blocks<typename decltype(tag)::Type>(args); });
  return done();
}

template <class W>
int dequantise_as(const DeviceDequantiseArgs& args) {
  const uint64_t blocks = (args.count + args.block - 1) / args.block;
  auto* const total = static_cast<W*>(args.total);
  for (uint64_t i = 0; i < args.count; ++i) {
    W sum = args.overwrite ? 0 : total[i];
    for (uint64_t p = 0; p < args.payloads; ++p) {
      sum += static_cast<W>(args.quantised[p * blocks * args.block + i]) *
             static_cast<W>(args.scales[p * blocks + i / args.block]);
    }
    total[i] = sum * static_cast<W>(args.factor);
  }
  return done();
}

int dequantise(const DeviceDequantiseArgs& args) {
  if (args.block == 0) return kInvalidValue;
  if (args.count == 0) return 0;
  if (args.dtype == DataType::kFloat32) return dequantise_as<float>(args);
  if (args.dtype == DataType::kFloat64) return dequantise_as<double>(args);
  return kInvalidValue;
}

}  // namespace

const CudaKernels kPlainKernels = {pack, unpack, reduce, dot, combine, quantise, dequantise};

}  // namespace fusewire::testing

#if defined(FUSEWIRE_PLAIN_KERNELS)
namespace fusewire {
const CudaKernels kCudaKernels = {testing::pack,    testing::unpack,   testing::reduce,    testing::dot,
                                  testing::combine, testing::quantise, testing::dequantise};
}  // namespace fusewire
#endif
