// Everybody's contributions to whoever owns them, reduced on the way or there.
//
// Note [Unequal parts]
// NCCL's reduce-scatter wants parts of equal length. Those of a tensor differ by a row at most, so they are laid out at
// the distance of the longest, and what lies between them is reduced with them and read by nobody. Where that would
// be more than twice the data (many tensors with fewer rows than there are members), it is one reduction per owner, in
// one group.
#include <algorithm>
#include <numeric>
#include <vector>

#include "collective/nccl/nccl_context.h"
#include "collective/part_counts.h"

namespace fusewire {
namespace {

size_t aligned(size_t offset) { return (offset + 15) / 16 * 16; }

class ReduceScatter {
 public:
  ReduceScatter(NcclContext& context, const Bucket& bucket)
      : context_(context),
        device_(context.device()),
        bucket_(bucket),
        counts_(part_counts(bucket, context.size(), context.rank())),
        numbers_(plan_numbers(bucket, context.size())) {}

  void run() {
    for (int owner = 0; owner < context_.size(); ++owner) {
      rows_.push_back(row_of(owner, end()));
      longest_ = std::max(longest_, aligned(rows_.back().bytes()));
    }
    if (end() == 0) return;
    if (!numbers_.native) return gathered();
    const auto members = static_cast<size_t>(context_.size());
    const bool equal = longest_ * members <= 2 * end();
    if (equal) {
      rows_.clear();
      for (int owner = 0; owner < context_.size(); ++owner) {
        rows_.push_back(row_of(owner, longest_ * static_cast<size_t>(owner)));
      }
    }
    std::byte* const buffer = memory(equal ? longest_ * members : end());
    pack(buffer);
    const size_t width = width_of(numbers_.type);
    if (equal) {
      context_.link.reduce_scatter(buffer, buffer + mine().begin, longest_ / width, numbers_.type, numbers_.op);
    } else {
      std::vector<size_t> offsets;
      std::vector<size_t> counts;
      for (const GpuRow& row : rows_) {
        offsets.push_back(row.begin);
        counts.push_back(row.bytes() / width);
      }
      context_.link.reduce_parts(buffer, buffer, offsets, counts, numbers_.type, numbers_.op);
    }
    gpu_unpack(device_, mine().out, bucket_.dtype, bucket_.wire, buffer, numbers_.unpack);
  }

 private:
  GpuRow row_of(int owner, size_t begin) const {
    GpuRow row(size_of(bucket_.wire), begin);
    for (size_t s = 0; s < bucket_.segments.size(); ++s) {
      const Segment& segment = bucket_.segments[s];
      row.append(&segment.input, counts_[s].in_offset(context_.rank(), owner),
                 owner == context_.rank() ? &segment.output : nullptr, 0, counts_[s](context_.rank(), owner));
    }
    return row;
  }

  const GpuRow& mine() const { return rows_[static_cast<size_t>(context_.rank())]; }
  size_t end() const { return rows_.empty() ? 0 : aligned(rows_.back().end); }

  // The same on all members: it follows from the counts.
  std::byte* memory(size_t bytes) {
    if (bytes <= context_.tuning.buffer_bytes) return context_.buffer.reserve(bytes);
    loan_ = GpuLoan(device_, GpuMemory::kDevice, bytes);
    return static_cast<std::byte*>(loan_.get());
  }

  void pack(std::byte* buffer) {
    std::vector<GpuPiece> pieces;
    for (const GpuRow& row : rows_) pieces.insert(pieces.end(), row.in.begin(), row.in.end());
    gpu_pack(device_, pieces, bucket_.dtype, bucket_.wire, buffer, numbers_.pack);
  }

  // What each has for each owner goes there, and the owner reduces it: nccl_numbers.h Note [Numbers over NCCL].
  void gathered() {
    const size_t stride = aligned(mine().bytes());
    const GpuLoan loan(device_, GpuMemory::kDevice, end() + stride * static_cast<size_t>(context_.size()));
    auto* const buffer = static_cast<std::byte*>(loan.get());
    pack(buffer);
    std::vector<NcclPart> from;
    std::vector<NcclPart> to;
    std::vector<const void*> sources;
    for (int other = 0; other < context_.size(); ++other) {
      const GpuRow& row = rows_[static_cast<size_t>(other)];
      from.push_back({buffer + row.begin, row.bytes(), other});
      std::byte* const place =
          other == context_.rank() ? buffer + row.begin : buffer + end() + stride * static_cast<size_t>(other);
      to.push_back({place, mine().bytes(), other});
      sources.push_back(place);
    }
    context_.link.exchange(from, to);
    if (mine().bytes() == 0) return;
    std::byte* const result = buffer + mine().begin;
    gpu_reduce(device_, sources, result, mine().bytes() / mine().width, bucket_.wire, numbers_.reduction);
    gpu_unpack(device_, mine().out, bucket_.dtype, bucket_.wire, buffer, {});
  }

  NcclContext& context_;
  GpuDevice& device_;
  const Bucket& bucket_;
  const std::vector<PartCounts> counts_;
  const NcclNumbers numbers_;
  std::vector<GpuRow> rows_;
  size_t longest_ = 0;
  GpuLoan loan_;
};

}  // namespace

void nccl_reduce_scatter(NcclContext& context, const Bucket& bucket) { ReduceScatter(context, bucket).run(); }

}  // namespace fusewire
