// The neutral element of each operator, for ranks that have nothing to contribute.
#include <limits>

#include "kernels/dispatch.h"
#include "kernels/kernels.h"

namespace fusewire {
namespace {

using namespace element;

template <class T>
T from_double(double x) {
  return Convert<T>::from(x);
}

template <class T, Combine kOp>
T identity() {
  if constexpr (Traits<T>::kFloating) {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    // -0.0: -0.0 + x is x for every x, where 0.0 + -0.0 would lose the sign.
    if (kOp == Combine::kSum) return from_double<T>(-0.0);
    if (kOp == Combine::kProduct) return from_double<T>(1.0);
    return from_double<T>(kOp == Combine::kMin ? kInfinity : -kInfinity);
  } else if constexpr (sizeof(typename Traits<T>::Wide) == 1) {
    return {static_cast<uint8_t>(kOp == Combine::kMin || kOp == Combine::kProduct)};
  } else {
    if (kOp == Combine::kSum) return 0;
    if (kOp == Combine::kProduct) return 1;
    return kOp == Combine::kMin ? std::numeric_limits<T>::max() : std::numeric_limits<T>::min();
  }
}

}  // namespace

void fill_identity(DataType dtype, ReduceOp op, void* destination, size_t count) {
  visit_type(dtype, [&](auto type_tag, size_t per_element) {
    visit_op(op, [&](auto op_tag) {
      using T = typename decltype(type_tag)::Type;
      const T value = identity<T, decltype(op_tag)::kCombine>();
      for (size_t i = 0; i < count * per_element; ++i) store(destination, i, value);
    });
  });
}

}  // namespace fusewire
