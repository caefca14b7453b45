// The table of one instruction set. Compiled once for each, with FUSEWIRE_ISA naming it (isa.cmake);
// element.h: Note [One namespace per instruction set].
#include "kernels/cpu/adasum.h"
#include "kernels/cpu/cast.h"
#include "kernels/cpu/copy.h"
#include "kernels/cpu/reduce.h"
#include "kernels/dispatch.h"
#include "kernels/kernels.h"

#define FUSEWIRE_QUOTE_(x) #x
#define FUSEWIRE_QUOTE(x) FUSEWIRE_QUOTE_(x)

namespace fusewire::element {
inline namespace FUSEWIRE_ISA {
namespace {

void copy(void* destination, const void* source, size_t bytes) {
  copy_bytes(static_cast<char*>(destination), static_cast<const char*>(source), bytes);
}

void cast(DataType from, const void* source, DataType to, void* destination, size_t count, double factor) {
  if (from == to && factor == 1.0) return copy(destination, source, count * size_of(from));
  visit_floating(from, [&](auto from_tag) {
    visit_floating(to, [&](auto to_tag) {
      cast_values<typename decltype(from_tag)::Type, typename decltype(to_tag)::Type>(
          from, static_cast<const char*>(source), to, static_cast<char*>(destination), count, factor);
    });
  });
}

template <class T, Combine kOp>
void reduce_type(const ReduceArgs& args) {
  constexpr bool kOrdering = kOp == Combine::kMin || kOp == Combine::kMax;
  if constexpr (Traits<T>::kFloating) {
    reduce_floats<T, kOp>(args);
  } else if constexpr (is_same<T, Bool>) {
    // On bytes of 0 and 1, `and` is the minimum and `or` the maximum.
    constexpr bool kAnd = kOp == Combine::kMin || kOp == Combine::kProduct;
    run_loop<Bool, uint8_t, kAnd ? Combine::kMin : Combine::kMax, 0, Scaling::kNone, false>(args);
  } else if constexpr (kOrdering) {
    reduce_integers<T, kOp>(args);
  } else {
    reduce_integers<Unsigned<T>, kOp>(args);  // wrapping around does not look at the sign
  }
}

void reduce(const ReduceArgs& args) {
  visit_type(args.dtype, [&](auto type_tag, size_t per_element) {
    visit_op(args.op, [&](auto op_tag) {
      using T = typename decltype(type_tag)::Type;
      if (per_element == 1) return reduce_type<T, decltype(op_tag)::kCombine>(args);
      ReduceArgs parts = args;
      parts.count *= per_element;
      parts.dtype = is_same<T, float> ? DataType::kFloat32 : DataType::kFloat64;
      reduce_type<T, decltype(op_tag)::kCombine>(parts);
    });
  });
}

void dots(const DotArgs& args) {
  visit_floating(args.dtype, [&](auto tag) { dot_products<typename decltype(tag)::Type>(args); });
}

void combine(const CombineArgs& args) {
  visit_floating(args.dtype, [&](auto tag) { combine_sources<typename decltype(tag)::Type>(args); });
}

}  // namespace

extern const CpuKernels kKernels;
const CpuKernels kKernels = {FUSEWIRE_QUOTE(FUSEWIRE_ISA), copy, cast, reduce, dots, combine};

}  // namespace FUSEWIRE_ISA
}  // namespace fusewire::element
