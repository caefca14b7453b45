// Scatters a buffer to a batch of tensors: scaled (an Average is divided here, where it was summed unscaled), cast
// back.
#include "kernels/cuda/launchers.h"
#include "kernels/cuda/transfer.cuh"
#include "kernels/dispatch.h"

namespace fusewire::cuda {
namespace {

// The scale of kernels.h, applied to a sum that has the tensor's own type. What element.h does for every type and
// scale.
template <class T>
struct General {
  using In = T;
  using Out = T;
  using Tensor = T;
  using Buffer = T;
  static constexpr bool kRare = true;
  double factor;
  int64_t divisor;
  Scaling scaling;

  __device__ T operator()(T x) const {
    const auto read = [&](int) { return x; };
    return element::reduce_element<T, element::Combine::kSum>(read, 1, factor, divisor);
  }
};

// The same bits where a floating type's factor fits its accumulator and is at most 1 in size: nothing overflows on the
// way then, hence there is nothing to rescue (element.h: Note [Rescue]).
template <class T>
struct Scaled {
  using In = T;
  using Out = T;
  using Tensor = T;
  using Buffer = T;
  static constexpr bool kRare = false;
  double factor;
  int64_t divisor;
  Scaling scaling;

  static bool serves(double factor) {
    return factor >= -1 && factor <= 1 && (sizeof(T) > 2 || element::fits_float(factor));
  }

  __device__ T operator()(T x) const {
    using namespace element;
    using Wide = typename Traits<T>::Wide;
    if constexpr (is_same<T, float>) {
      if (scaling == Scaling::kInFloat) return x * static_cast<float>(factor);
    }
    const Wide wide = Traits<T>::widen(x) * static_cast<Wide>(factor);
    return Convert<T>::from(divisor == 1 ? wide : wide / static_cast<Wide>(divisor));
  }
};

// A narrower sum: scaled before it is rounded to the tensor's type.
template <class From, class To>
struct Widened {
  using In = From;
  using Out = To;
  using Tensor = To;
  using Buffer = From;
  static constexpr bool kRare = false;
  double factor;
  int64_t divisor;
  Scaling scaling;

  __device__ To operator()(From x) const {
    using namespace element;
    if (scaling == Scaling::kNone) return Convert<To>::from(Traits<From>::widen(x));
    const double wide = to_double(x) * factor;
    return Convert<To>::from(divisor == 1 ? wide : wide / static_cast<double>(divisor));
  }
};

template <class Map>
int start_scaled(const TransferArgs& args) {
  const Scaling scaling = scaling_of(args.wire, args.dtype, args.factor, args.divisor);
  return start<false>(args, Map{args.factor, args.divisor, scaling});
}

}  // namespace

int unpack(const TransferArgs& given) {
  using element::BFloat16;
  using element::Half;
  TransferArgs args = given;
  args.dtype = real_type(given.dtype);
  args.wire = real_type(given.wire);
  const auto from = [&](DataType wire) { return args.wire == wire; };
  if (args.dtype == args.wire) {
    if ((args.factor == 1.0 && args.divisor == 1) || args.dtype == DataType::kBool) {
      return start_same<false>(args, element_bytes(args.dtype));
    }
    int error = kInvalidValue;
    element::visit_type(args.dtype, [&](auto tag, int) {
      using T = typename decltype(tag)::Type;
      if constexpr (element::Traits<T>::kFloating) {
        divide_by_multiplying(&args.factor, &args.divisor);
        error = Scaled<T>::serves(args.factor) ? start_scaled<Scaled<T>>(args) : start_scaled<General<T>>(args);
      } else if constexpr (!element::is_same<T, element::Bool>) {
        error = start_scaled<General<T>>(args);
      }
    });
    return error;
  }
  divide_by_multiplying(&args.factor, &args.divisor);
  switch (args.dtype) {
    case DataType::kFloat32:
      if (from(DataType::kFloat16)) return start_scaled<Widened<Half, float>>(args);
      if (from(DataType::kBFloat16)) return start_scaled<Widened<BFloat16, float>>(args);
      break;
    case DataType::kFloat64:
      if (from(DataType::kFloat32)) return start_scaled<Widened<float, double>>(args);
      if (from(DataType::kFloat16)) return start_scaled<Widened<Half, double>>(args);
      if (from(DataType::kBFloat16)) return start_scaled<Widened<BFloat16, double>>(args);
      break;
    default:
      break;
  }
  return kInvalidValue;
}

}  // namespace fusewire::cuda
