// What every algorithm over NCCL works with, and the algorithms: one file each.
//
// Note [Where a bucket is reduced]
// Small tensors are packed into the fusion buffer (nccl_buffer.h), one launch for all of them, and unpacked from it
// after the collective. One large tensor stays where it lies if its layout allows that: a bucket of a single tensor of
// at least `direct_bytes` does not use the fusion buffer on any member, because NCCL must see registered memory on all
// of them or on none, and layouts are each member's own. A member whose layout does need packing then does it in
// ordinary memory. What is larger than the buffer goes in pieces, cut alike everywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "collective/backend.h"
#include "collective/gpu_transfer.h"
#include "collective/nccl/nccl_buffer.h"
#include "collective/nccl/nccl_link.h"
#include "collective/nccl/nccl_numbers.h"

namespace fusewire {

struct NcclTuning {
  size_t buffer_bytes = 128 << 20;  // the largest piece that is packed
  size_t direct_bytes = 4 << 20;
};

struct NcclContext {
  NcclContext(std::shared_ptr<GpuDevice> gpu, NcclApi& api, const GpuPlaneOptions& options, Backend& cpu,
              const NcclTuning& how)
      : link(std::move(gpu), api, options, cpu), buffer(link), tuning(how) {}

  GpuDevice& device() const { return link.device(); }
  int rank() const { return link.rank(); }
  int size() const { return link.size(); }

  NcclLink link;
  NcclBuffer buffer;
  const NcclTuning tuning;
};

// Tensors, or parts of them, in a row, each at a multiple of 16 bytes in a buffer. The same on all members but for the
// views.
struct GpuRow {
  GpuRow(size_t element_width, uint64_t first) : width(element_width), begin(first), end(first) {}

  void append(const TensorView* input, int64_t in_begin, const TensorView* output, int64_t out_begin, int64_t count);
  uint64_t bytes() const { return end - begin; }

  size_t width;    // of an element in the buffer
  uint64_t begin;  // in the buffer, in bytes
  uint64_t end;
  std::vector<GpuPiece> in{};   // what this member packs
  std::vector<GpuPiece> out{};  // what it unpacks
};

// The rows of at most `most` bytes that make up a bucket in which all members hold the same elements. Each begins at 0.
std::vector<GpuRow> cut_rows(const Bucket& bucket, DataType wire, size_t most);

// Note [Where a bucket is reduced]
bool is_large(const Bucket& bucket, DataType wire, const NcclTuning& tuning);

// Where elements of the view from `begin` on lie if they lie in order without gaps, else null.
std::byte* flat_at(const TensorView& view, int64_t begin);

// values[i] = values[i] * factor / divisor, where that changes something; `from` may equal `to`.
void gpu_scale(GpuDevice& device, const void* from, void* to, int64_t count, DataType dtype, const GpuScale& scale);

// The reduction of everybody's contributions, in rank order, by the kernel; `to` may be one of them.
void gpu_reduce(GpuDevice& device, const std::vector<const void*>& from, void* to, size_t count, DataType dtype,
                const Reduction& reduction);

void nccl_allreduce(NcclContext& context, const Bucket& bucket);
void nccl_broadcast(NcclContext& context, const Bucket& bucket);
void nccl_allgather(NcclContext& context, const Bucket& bucket);
void nccl_alltoall(NcclContext& context, const Bucket& bucket);
void nccl_reduce_scatter(NcclContext& context, const Bucket& bucket);

}  // namespace fusewire
