// Gathers a batch of tensors into a buffer: scaled, cast.
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/transfer.cuh"
#include "kernels/dispatch.h"

namespace fusewire::cuda {
namespace {

template <class From, class To>
struct Cast {
  using In = From;
  using Out = To;
  using Tensor = From;
  using Buffer = To;
  static constexpr bool kRare = false;
  double factor;
  Scaling scaling;

  __device__ To operator()(From x) const {
    using namespace element;
    if constexpr (!is_same<From, double> && !is_same<To, double>) {
      const float wide = to_single(x);
      if (scaling == Scaling::kNone) return Convert<To>::from(wide);
      if (scaling == Scaling::kInFloat) return Convert<To>::from(wide * static_cast<float>(factor));
    }
    return cast_element<From, To>(x, factor);
  }

  __device__ static float to_single(float x) { return x; }
  template <class Small>
  __device__ static float to_single(Small x) {
    return element::to_float(x);
  }
};

template <class From, class To>
int start_cast(const TransferArgs& args) {
  return start<true>(args, Cast<From, To>{args.factor, scaling_of(args.dtype, args.wire, args.factor, 1)});
}

}  // namespace

int pack(const TransferArgs& given) {
  using element::BFloat16;
  using element::Half;
  TransferArgs args = given;
  args.dtype = real_type(given.dtype);
  args.wire = real_type(given.wire);
  if (args.dtype == args.wire && args.factor == 1.0) return start_same<true>(args, element_bytes(args.dtype));
  const auto to = [&](DataType wire) { return args.wire == wire; };
  switch (args.dtype) {
    case DataType::kFloat16:
      if (to(DataType::kFloat16)) return start_cast<Half, Half>(args);
      break;
    case DataType::kBFloat16:
      if (to(DataType::kBFloat16)) return start_cast<BFloat16, BFloat16>(args);
      break;
    case DataType::kFloat32:
      if (to(DataType::kFloat32)) return start_cast<float, float>(args);
      if (to(DataType::kFloat16)) return start_cast<float, Half>(args);
      if (to(DataType::kBFloat16)) return start_cast<float, BFloat16>(args);
      break;
    case DataType::kFloat64:
      if (to(DataType::kFloat64)) return start_cast<double, double>(args);
      if (to(DataType::kFloat32)) return start_cast<double, float>(args);
      if (to(DataType::kFloat16)) return start_cast<double, Half>(args);
      if (to(DataType::kBFloat16)) return start_cast<double, BFloat16>(args);
      break;
    default:
      break;
  }
  return kInvalidValue;
}

}  // namespace fusewire::cuda
