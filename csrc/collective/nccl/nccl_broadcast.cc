// The root's bytes to everybody: packed, or from where they lie.
#include <algorithm>
#include <vector>

#include "collective/nccl/nccl_context.h"

namespace fusewire {

void nccl_broadcast(NcclContext& context, const Bucket& bucket) {
  GpuDevice& device = context.device();
  const bool large = is_large(bucket, bucket.dtype, context.tuning);
  const bool root = context.rank() == bucket.root;
  std::vector<GpuRow> rows = cut_rows(bucket, bucket.dtype, context.tuning.buffer_bytes);
  size_t longest = 0;
  for (const GpuRow& row : rows) longest = std::max(longest, row.bytes());
  if (longest == 0) return;
  GpuLoan loan;
  std::byte* buffer = large ? nullptr : context.buffer.reserve(longest);
  const auto memory = [&] {
    if (buffer == nullptr) {
      loan = GpuLoan(device, GpuMemory::kDevice, longest);
      buffer = static_cast<std::byte*>(loan.get());
    }
    return buffer;
  };
  for (GpuRow& row : rows) {
    if (root) {  // what is its own input need not be written
      std::erase_if(row.out, [&](const GpuPiece& piece) {
        const auto own = std::find_if(row.in.begin(), row.in.end(),
                                      [&](const GpuPiece& input) { return input.offset == piece.offset; });
        return own->view->data == piece.view->data && own->view->strides == piece.view->strides;
      });
    }
    const GpuPiece* const input = root ? &row.in.front() : nullptr;
    const GpuPiece* const output = row.out.empty() ? nullptr : &row.out.front();
    std::byte* from = large && input != nullptr ? flat_at(*input->view, input->begin) : nullptr;
    std::byte* const home = large && output != nullptr ? flat_at(*output->view, output->begin) : nullptr;
    if (root && from == nullptr) {
      from = memory();
      gpu_pack(device, row.in, bucket.dtype, bucket.dtype, from, {});
    }
    std::byte* const to = home != nullptr ? home : root && output == nullptr ? from : memory();
    context.link.broadcast(root ? from : to, to, row.bytes(), bucket.root);
    if (home == nullptr) gpu_unpack(device, row.out, bucket.dtype, bucket.dtype, to, {});
  }
}

}  // namespace fusewire
