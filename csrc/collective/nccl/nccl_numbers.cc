#include "collective/nccl/nccl_numbers.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <optional>
#include <string>

#include "common/error.h"

namespace fusewire {
namespace {

// Of the numbers in an element: complex ones have two.
std::optional<NcclType> type_of(DataType dtype) {
  switch (dtype) {
    case DataType::kBool:
    case DataType::kUInt8:
      return NcclType::kUint8;
    case DataType::kInt8:
      return NcclType::kInt8;
    case DataType::kUInt32:
      return NcclType::kUint32;
    case DataType::kInt32:
      return NcclType::kInt32;
    case DataType::kUInt64:
      return NcclType::kUint64;
    case DataType::kInt64:
      return NcclType::kInt64;
    case DataType::kFloat16:
      return NcclType::kFloat16;
    case DataType::kBFloat16:
      return NcclType::kBfloat16;
    case DataType::kFloat32:
    case DataType::kComplex64:
      return NcclType::kFloat32;
    case DataType::kFloat64:
    case DataType::kComplex128:
      return NcclType::kFloat64;
    case DataType::kUInt16:
    case DataType::kInt16:
      return std::nullopt;
  }
  return std::nullopt;
}

NcclOp op_of(ReduceOp op, DataType dtype) {
  const bool bytes = dtype == DataType::kBool;
  switch (op) {
    case ReduceOp::kMin:
      return NcclOp::kMin;
    case ReduceOp::kMax:
      return NcclOp::kMax;
    case ReduceOp::kProduct:
      return bytes ? NcclOp::kMin : NcclOp::kProd;
    case ReduceOp::kSum:
    case ReduceOp::kAverage:
    case ReduceOp::kAdasum:  // of one member, which is a sum
      return bytes ? NcclOp::kMax : NcclOp::kSum;
  }
  return NcclOp::kSum;
}

bool real_or_complex(DataType dtype) { return is_floating(dtype) || is_complex(dtype); }

uint64_t identity_bits(DataType wire, ReduceOp op) {
  unsigned char element[16] = {};
  fill_identity(wire, op, element, 1);
  uint64_t bits = 0;
  std::memcpy(&bits, element, size_of(wire) / (is_complex(wire) ? 2 : 1));
  return bits;
}

bool scaled(const Scale& scale) { return scale.factor != 1.0 || scale.divisor != 1; }

bool native(DataType wire, const Reduction& reduction) {
  const bool sum = reduction.op == ReduceOp::kSum;
  if (real_or_complex(wire)) return sum;
  if (wire == DataType::kBool) return true;
  if (!type_of(wire)) return false;
  const bool in_order = reduction.op == ReduceOp::kMin || reduction.op == ReduceOp::kMax;
  return in_order || !scaled(reduction.scale) || size_of(wire) == sizeof(int64_t);
}

// Note [Means without overflow]
void scale_floats(const Bucket& bucket, int size, NcclNumbers& numbers) {
  const bool average = bucket.op == ReduceOp::kAverage;
  const bool early = bucket.wire != bucket.dtype || std::abs(bucket.prescale) < 1;
  const double power = average ? static_cast<double>(std::bit_ceil(static_cast<unsigned>(size))) : 1.0;
  numbers.pack.factor = (early ? bucket.prescale : 1.0) / power;
  numbers.unpack.factor = (early ? 1.0 : bucket.prescale) * bucket.postscale;
  if (average && power != size) {
    numbers.unpack.factor *= power;
    numbers.unpack.divisor = size;
  }
}

}  // namespace

NcclNumbers plan_numbers(const Bucket& bucket, int size) {
  ReductionPlan plan = plan_reduction(bucket, size);
  if (plan.reduction.op == ReduceOp::kAdasum) plan.reduction.op = plan.format.identity = ReduceOp::kSum;
  NcclNumbers numbers;
  numbers.native = native(bucket.wire, plan.reduction);
  numbers.reduction = plan.reduction;
  numbers.pack.identity = identity_bits(bucket.wire, plan.format.identity);
  numbers.pack.factor = plan.format.factor;
  if (!numbers.native) {
    if (size > kMaxReduceSources && is_integer(bucket.wire) && scaled(plan.reduction.scale)) {
      throw Error(ErrorCode::kInvalidType, "an Average, or another scaled reduction, of " +
                                               std::string(to_string(bucket.wire)) + " on GPUs is limited to " +
                                               std::to_string(kMaxReduceSources) + " ranks; convert to int64 first");
    }
    return numbers;
  }
  numbers.type = *type_of(bucket.wire);
  numbers.op = op_of(plan.reduction.op, bucket.wire);
  if (real_or_complex(bucket.wire)) {
    scale_floats(bucket, size, numbers);
  } else if (bucket.wire != DataType::kBool) {
    numbers.unpack.factor = plan.reduction.scale.factor;
    numbers.unpack.divisor = plan.reduction.scale.divisor;
  }
  return numbers;
}

}  // namespace fusewire
