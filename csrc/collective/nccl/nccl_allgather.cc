// Everybody's rows to everybody.
//
// Note [Unequal rows]
// Where members give equally much, it is NCCL's allgather. Where not, it is one broadcast per member in one group,
// which NCCL launches together: exactly the bytes that there are. (To pad all rows to the longest would cost n times
// what the member with the most has, and sparse gradients are as unequal as that.)
#include <algorithm>
#include <vector>

#include "collective/nccl/nccl_context.h"
#include "collective/part_counts.h"

namespace fusewire {
namespace {

class Allgather {
 public:
  Allgather(NcclContext& context, const Bucket& bucket)
      : context_(context),
        bucket_(bucket),
        counts_(part_counts(bucket, context.size(), context.rank())),
        width_(size_of(bucket.dtype)) {}

  void run() {
    lay_out();
    if (total_ == 0) return;
    const bool large = bucket_.segments.size() == 1 && total_ >= context_.tuning.direct_bytes;
    const GpuRow& mine = rows_[static_cast<size_t>(context_.rank())];
    std::byte* const home = large ? result_in_place() : nullptr;
    GpuLoan loan;
    std::byte* to = home;
    if (!large && total_ <= context_.tuning.buffer_bytes) {
      to = context_.buffer.reserve(total_);
    } else if (home == nullptr) {
      loan = GpuLoan(context_.device(), GpuMemory::kDevice, total_);
      to = static_cast<std::byte*>(loan.get());
    }
    const std::byte* from = large ? flat_at(bucket_.segments.front().input, 0) : nullptr;
    if (from == nullptr) {
      gpu_pack(context_.device(), mine.in, bucket_.dtype, bucket_.dtype, to, {});
      from = to + mine.begin;
    }
    collect(from, to);
    if (home == nullptr) unpack(to);
  }

 private:
  // One row per member. Rows of equal length follow each other without gaps, as NCCL wants them; only then the first
  // tensor of a row may lie at an odd address.
  void lay_out() {
    const bool alone = bucket_.segments.size() == 1;
    for (int giver = 0; giver < context_.size(); ++giver) {
      GpuRow& row = rows_.emplace_back(width_, total_);
      for (size_t s = 0; s < bucket_.segments.size(); ++s) {
        const Segment& segment = bucket_.segments[s];
        row.append(giver == context_.rank() ? &segment.input : nullptr, 0, &segment.output,
                   counts_[s].out_offset(giver, context_.rank()), counts_[s](giver, context_.rank()));
      }
      if (!alone) row.end = row.begin + (row.bytes() + 15) / 16 * 16;  // of one tensor: as it lies in the output
      total_ = row.end;
    }
  }

  std::byte* result_in_place() const {
    const Segment& segment = bucket_.segments.front();
    if (overwrites_input(bucket_, segment, context_.size(), context_.rank())) return nullptr;
    return flat_at(segment.output, 0);
  }

  void collect(const std::byte* from, std::byte* to) {
    const size_t first = rows_.front().bytes();
    if (std::all_of(rows_.begin(), rows_.end(), [&](const GpuRow& row) { return row.bytes() == first; })) {
      return context_.link.all_gather(from, to, first);
    }
    std::vector<NcclPart> parts;
    for (int giver = 0; giver < context_.size(); ++giver) {
      const GpuRow& row = rows_[static_cast<size_t>(giver)];
      parts.push_back({to + row.begin, row.bytes(), giver});
    }
    context_.link.gather_parts(from, parts);
  }

  void unpack(std::byte* from) {
    std::vector<GpuPiece> pieces;
    for (const GpuRow& row : rows_) pieces.insert(pieces.end(), row.out.begin(), row.out.end());
    gpu_unpack(context_.device(), pieces, bucket_.dtype, bucket_.dtype, from, {});
  }

  NcclContext& context_;
  const Bucket& bucket_;
  const std::vector<PartCounts> counts_;
  const size_t width_;
  std::vector<GpuRow> rows_;
  size_t total_ = 0;
};

}  // namespace

void nccl_allgather(NcclContext& context, const Bucket& bucket) { Allgather(context, bucket).run(); }

}  // namespace fusewire
