// From run-time tags to compile-time types, once per call and outside every loop. Shared by the reference and the
// vector tables, hence in the namespace of the instruction set (element.h: Note [One namespace per instruction set]).
#pragma once

#include "common/dtype.h"
#include "kernels/element.h"

namespace fusewire::element {
inline namespace FUSEWIRE_ISA {

template <class T>
struct Tag {
  using Type = T;
};

template <Combine kOp>
struct OpTag {
  static constexpr Combine kCombine = kOp;
};

// f(Tag<T>, elements per tensor element): complex numbers are two real ones wherever they are allowed.
template <class F>
inline void visit_type(DataType type, F f) {
  switch (type) {
    case DataType::kUInt8:
      return f(Tag<uint8_t>{}, 1);
    case DataType::kInt8:
      return f(Tag<int8_t>{}, 1);
    case DataType::kUInt16:
      return f(Tag<uint16_t>{}, 1);
    case DataType::kInt16:
      return f(Tag<int16_t>{}, 1);
    case DataType::kUInt32:
      return f(Tag<uint32_t>{}, 1);
    case DataType::kInt32:
      return f(Tag<int32_t>{}, 1);
    case DataType::kUInt64:
      return f(Tag<uint64_t>{}, 1);
    case DataType::kInt64:
      return f(Tag<int64_t>{}, 1);
    case DataType::kFloat16:
      return f(Tag<Half>{}, 1);
    case DataType::kBFloat16:
      return f(Tag<BFloat16>{}, 1);
    case DataType::kFloat32:
      return f(Tag<float>{}, 1);
    case DataType::kFloat64:
      return f(Tag<double>{}, 1);
    case DataType::kBool:
      return f(Tag<Bool>{}, 1);
    case DataType::kComplex64:
      return f(Tag<float>{}, 2);
    case DataType::kComplex128:
      return f(Tag<double>{}, 2);
  }
}

// f(Tag<T>) for the four floating types; anything else is the caller's bug.
template <class F>
inline void visit_floating(DataType type, F f) {
  switch (type) {
    case DataType::kFloat16:
      return f(Tag<Half>{});
    case DataType::kBFloat16:
      return f(Tag<BFloat16>{});
    case DataType::kFloat32:
      return f(Tag<float>{});
    case DataType::kFloat64:
      return f(Tag<double>{});
    default:
      __builtin_trap();
  }
}

template <class F>
inline void visit_op(ReduceOp op, F f) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
    case ReduceOp::kAdasum:  // a sum with coefficients
      return f(OpTag<Combine::kSum>{});
    case ReduceOp::kMin:
      return f(OpTag<Combine::kMin>{});
    case ReduceOp::kMax:
      return f(OpTag<Combine::kMax>{});
    case ReduceOp::kProduct:
      return f(OpTag<Combine::kProduct>{});
  }
}

}  // namespace FUSEWIRE_ISA
}  // namespace fusewire::element
