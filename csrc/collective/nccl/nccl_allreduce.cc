// Pack, one collective, unpack.
#include <algorithm>
#include <vector>

#include "collective/nccl/nccl_context.h"

namespace fusewire {
namespace {

bool changes(const GpuScale& scale) { return scale.factor != 1.0 || scale.divisor != 1; }

class Allreduce {
 public:
  Allreduce(NcclContext& context, const Bucket& bucket)
      : context_(context),
        device_(context.device()),
        bucket_(bucket),
        numbers_(plan_numbers(bucket, context.size())),
        large_(is_large(bucket, bucket.wire, context.tuning)) {}

  void run() {
    const auto members = static_cast<size_t>(context_.size());
    const size_t most = context_.tuning.buffer_bytes / (numbers_.native ? 1 : members) / 16 * 16;  // as row_stride()
    const std::vector<GpuRow> rows = cut_rows(bucket_, bucket_.wire, most);
    size_t longest = 0;
    for (const GpuRow& row : rows) longest = std::max(longest, row.bytes());
    if (longest == 0) return;
    if (!large_) buffer_ = context_.buffer.reserve(room(longest));
    for (const GpuRow& row : rows) {
      if (!numbers_.native) {
        gathered(row, memory(room(longest)));
      } else if (large_) {
        in_place(row, longest);
      } else {
        fused(row);
      }
    }
  }

 private:
  // For a row, in the buffer: once, or for everybody's.
  size_t room(size_t bytes) const {
    return numbers_.native ? bytes : row_stride(bytes) * static_cast<size_t>(context_.size());
  }
  static size_t row_stride(size_t bytes) { return (bytes + 15) / 16 * 16; }

  // Memory to pack in. That of a large tensor is needed where its layout says so, and not for longer.
  std::byte* memory(size_t bytes) {
    if (buffer_ == nullptr) {
      loan_ = GpuLoan(device_, GpuMemory::kDevice, bytes);
      buffer_ = static_cast<std::byte*>(loan_.get());
    }
    return buffer_;
  }

  void pack(const GpuRow& row, std::byte* to) {
    gpu_pack(device_, row.in, bucket_.dtype, bucket_.wire, to, numbers_.pack);
  }
  void unpack(const GpuRow& row, std::byte* from, const GpuScale& scale) {
    gpu_unpack(device_, row.out, bucket_.dtype, bucket_.wire, from, scale);
  }
  void reduce(const void* from, void* to, const GpuRow& row) {
    context_.link.all_reduce(from, to, row.bytes() / width_of(numbers_.type), numbers_.type, numbers_.op);
  }

  void fused(const GpuRow& row) {
    pack(row, buffer_);
    reduce(buffer_, buffer_, row);
    unpack(row, buffer_, numbers_.unpack);
  }

  // One tensor, or a piece of one, from where it lies to where the result belongs.
  void in_place(const GpuRow& row, size_t longest) {
    const GpuPiece& input = row.in.front();
    const GpuPiece& output = row.out.front();
    const bool same_type = bucket_.wire == bucket_.dtype;
    const std::byte* from = same_type ? flat_at(*input.view, input.begin) : nullptr;
    std::byte* const home = same_type ? flat_at(*output.view, output.begin) : nullptr;
    std::byte* const to = home != nullptr ? home : memory(longest);
    if (from == nullptr) {
      pack(row, to);
      from = to;
    } else if (changes(numbers_.pack)) {
      gpu_scale(device_, from, to, input.count, bucket_.wire, numbers_.pack);
      from = to;
    }
    reduce(from, to, row);
    if (home == nullptr) {
      unpack(row, to, numbers_.unpack);
    } else if (changes(numbers_.unpack)) {
      gpu_scale(device_, home, home, output.count, bucket_.wire, numbers_.unpack);
    }
  }

  // Everybody's contributions to everybody, who then reduces them: nccl_numbers.h Note [Numbers over NCCL].
  void gathered(const GpuRow& row, std::byte* rows) {
    const size_t stride = row_stride(row.bytes());
    std::byte* const mine = rows + stride * static_cast<size_t>(context_.rank());
    pack(row, mine);
    context_.link.all_gather(mine, rows, stride);
    std::vector<const void*> sources;
    for (int r = 0; r < context_.size(); ++r) sources.push_back(rows + stride * static_cast<size_t>(r));
    gpu_reduce(device_, sources, rows, row.bytes() / row.width, bucket_.wire, numbers_.reduction);
    unpack(row, rows, {});
  }

  NcclContext& context_;
  GpuDevice& device_;
  const Bucket& bucket_;
  const NcclNumbers numbers_;
  const bool large_;
  std::byte* buffer_ = nullptr;
  GpuLoan loan_;
};

}  // namespace

void nccl_allreduce(NcclContext& context, const Bucket& bucket) { Allreduce(context, bucket).run(); }

}  // namespace fusewire
