// What of a reduction NCCL does, and what the project's own kernels do before and after it.
//
// Note [Numbers over NCCL]
// NCCL adds two values at a time, in the type that travels and in an order of its own: every rank gets the same bits,
// but not those of the planes that have all contributions at hand and a wide accumulator. That is what sums of floats
// cost. Everything else gives the bits of the CPU planes:
//   - NCCL's Min and Max drop a NaN, its products round at every step, and it has no 16-bit integers. Integers narrower
//     than 64 bits that are scaled (an Average is) need a sum wider than themselves. All of these gather everybody's
//     contributions, and the kernel `reduce` makes the result of them in rank order.
//   - Other integers wrap around alike in any order; bool is the maximum (or) or the minimum (and) of bytes.
// Scales are applied by pack and unpack, because NCCL's own (Avg, PreMulSum) turn its faster kernels off.
//
// Note [Means without overflow]
// A mean must be finite where it can be represented, though the sum may not be. So contributions to an Average are
// multiplied by 2^-k first, the least power of two with 2^k >= n, and the sum by 2^k / n afterwards: exact but for
// subnormal numbers (of fp16, below 2^-14 * 2^k in size, to their last bits), and where n is a power of two there is
// nothing left to do afterwards. A prescale that makes numbers smaller is there to prevent overflow, so it comes first,
// too; one that makes them larger is applied afterwards.
#pragma once

#include <cstddef>

#include "collective/gpu_transfer.h"
#include "collective/nccl/nccl_abi.h"
#include "collective/reduction.h"

namespace fusewire {

struct NcclNumbers {
  bool native = true;  // NCCL reduces
  NcclType type = NcclType::kUint8;
  NcclOp op = NcclOp::kSum;
  GpuScale pack{};
  GpuScale unpack{};
  Reduction reduction{};  // where NCCL does not: by the kernel
};

// Throws Error(kInvalidType), on all members, where a set is too large for what the kernel would have to do.
NcclNumbers plan_numbers(const Bucket& bucket, int size);

}  // namespace fusewire
