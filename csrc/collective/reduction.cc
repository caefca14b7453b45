#include "collective/reduction.h"

#include <cmath>

namespace fusewire {

ReductionPlan plan_reduction(const Bucket& bucket, int size) {
  ReductionPlan plan{{bucket.dtype, bucket.wire}, {bucket.op, {bucket.postscale, 1}}};
  if (bucket.op == ReduceOp::kAverage) plan.reduction = {ReduceOp::kSum, {bucket.postscale, size}};
  if (bucket.wire != bucket.dtype) {
    plan.format.factor = bucket.prescale;
  } else {
    double crossing = bucket.prescale;
    if (bucket.op == ReduceOp::kProduct) crossing = std::pow(bucket.prescale, size);
    if (bucket.prescale < 0 && bucket.op == ReduceOp::kMin) plan.reduction.op = ReduceOp::kMax;
    if (bucket.prescale < 0 && bucket.op == ReduceOp::kMax) plan.reduction.op = ReduceOp::kMin;
    plan.reduction.scale.factor = crossing * bucket.postscale;
  }
  plan.format.identity = plan.reduction.op;
  return plan;
}

}  // namespace fusewire
