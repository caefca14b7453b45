// The arithmetic of a bucket that reduces, the same on all ranks and on every data plane that sums by itself.
#pragma once

#include <vector>

#include "collective/backend.h"
#include "collective/bucket_cursor.h"
#include "kernels/kernels.h"

namespace fusewire {

// What Adasum has found (adasum.h): the arguments of CombineArgs, for every entry of a cursor.
struct Combinations {
  std::vector<double> scales;        // [entry][rank]
  std::vector<double> coefficients;  // [entry][rank]
  std::vector<double> factors;       // [entry]
};

struct Reduction {
  ReduceOp op = ReduceOp::kSum;
  Scale scale;
  const Combinations* combinations = nullptr;  // take the place of the other two
};

struct ReductionPlan {
  BucketCursor::Format format;
  Reduction reduction;
};

// Where scales are applied. Compression narrows at packing, so the prescale goes there, to keep what it protects from
// overflow in range; otherwise all scaling happens in the accumulator, once. Factors may cross the operator only if
// they commute with it: a negative one turns Min into Max, and n factors cross a Product.
ReductionPlan plan_reduction(const Bucket& bucket, int size);

}  // namespace fusewire
