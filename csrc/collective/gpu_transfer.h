// Pack and unpack of whole buckets on a GPU: one launch each, whatever the number of tensors.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "collective/backend.h"
#include "collective/gpu_device.h"
#include "kernels/device_plan.h"

namespace fusewire {

// Where a run of elements of a tensor lies in a buffer.
struct GpuPiece {
  const TensorView* view = nullptr;  // without data: packing writes the identity, unpacking leaves it out
  int64_t begin = 0;                 // first element, in logical order
  int64_t count = 0;
  uint64_t offset = 0;  // in the buffer, in bytes; multiples of 16 are fast
};

// How numbers change on the way.
struct GpuScale {
  double factor = 1.0;
  int64_t divisor = 1;
  uint64_t identity = 0;  // pack: the bits that absent tensors contribute, in the buffer's type
};

// Puts one launch on the device's stream: tensors of `dtype` to, or from, a buffer of `wire`. The table that the kernel
// reads goes before it on the same stream, so nothing waits.
void gpu_pack(GpuDevice& device, const std::vector<GpuPiece>& pieces, DataType dtype, DataType wire, void* buffer,
              const GpuScale& scale);
void gpu_unpack(GpuDevice& device, const std::vector<GpuPiece>& pieces, DataType dtype, DataType wire, void* buffer,
                const GpuScale& scale);

// Device memory with these bytes in it (once the stream has come so far), by way of pinned memory.
GpuLoan gpu_upload(GpuDevice& device, size_t bytes, const std::function<void(void*)>& write);

}  // namespace fusewire
