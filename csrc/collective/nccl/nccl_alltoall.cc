// Each pair's rows by a send and a receive, all in one group. A member's own row is copied on the device.
#include <algorithm>
#include <vector>

#include "collective/nccl/nccl_context.h"
#include "collective/part_counts.h"

namespace fusewire {
namespace {

size_t aligned(size_t offset) { return (offset + 15) / 16 * 16; }

}  // namespace

// A single tensor is sent from where it lies and received where it belongs, if layouts allow that: with sends and
// receives that is each member's own business.
void nccl_alltoall(NcclContext& context, const Bucket& bucket) {
  const int size = context.size();
  const int rank = context.rank();
  const size_t width = size_of(bucket.dtype);
  const std::vector<PartCounts> counts = part_counts(bucket, size, rank);
  const auto row_of = [&](int giver, int taker, size_t begin) {
    GpuRow row(width, begin);
    for (size_t s = 0; s < bucket.segments.size(); ++s) {
      const Segment& segment = bucket.segments[s];
      row.append(giver == rank ? &segment.input : nullptr, counts[s].in_offset(giver, taker),
                 taker == rank ? &segment.output : nullptr, counts[s].out_offset(giver, taker),
                 counts[s](giver, taker));
    }
    return row;
  };
  std::byte* home = nullptr;
  std::byte* input = nullptr;
  if (bucket.segments.size() == 1 && !overwrites_input(bucket, bucket.segments.front(), size, rank)) {
    input = flat_at(bucket.segments.front().input, 0);
    home = flat_at(bucket.segments.front().output, 0);
  }
  size_t room = 0;
  const auto lay_out = [&](auto&& row_with) {
    std::vector<GpuRow> rows;
    for (int other = 0; other < size; ++other) {
      rows.push_back(row_with(other));
      room = std::max(room, aligned(rows.back().end));
    }
    return rows;
  };
  const std::vector<GpuRow> given = lay_out([&](int taker) { return row_of(rank, taker, room); });
  if (input != nullptr) room = 0;
  const std::vector<GpuRow> taken = lay_out([&](int giver) {
    // What stays here need not move: it is unpacked from where it was packed.
    return giver == rank && input == nullptr ? given[static_cast<size_t>(rank)] : row_of(giver, rank, room);
  });
  GpuLoan loan;
  if (input == nullptr || home == nullptr) loan = GpuLoan(context.device(), GpuMemory::kDevice, room);
  auto* const buffer = static_cast<std::byte*>(loan.get());

  std::vector<GpuPiece> in;
  std::vector<GpuPiece> out;
  std::vector<NcclPart> from;
  std::vector<NcclPart> to;
  for (int other = 0; other < size; ++other) {
    const GpuRow& give = given[static_cast<size_t>(other)];
    const GpuRow& take = taken[static_cast<size_t>(other)];
    in.insert(in.end(), give.in.begin(), give.in.end());
    out.insert(out.end(), take.out.begin(), take.out.end());
    const auto in_place = [&](std::byte* tensor, int64_t first) { return tensor + static_cast<size_t>(first) * width; };
    from.push_back({input != nullptr ? in_place(input, counts[0].in_offset(rank, other)) : buffer + give.begin,
                    give.bytes(), other});
    to.push_back({home != nullptr ? in_place(home, counts[0].out_offset(other, rank)) : buffer + take.begin,
                  take.bytes(), other});
  }
  if (input == nullptr) gpu_pack(context.device(), in, bucket.dtype, bucket.dtype, buffer, {});
  const NcclPart& own_from = from[static_cast<size_t>(rank)];
  const NcclPart& own_to = to[static_cast<size_t>(rank)];
  if (own_from.bytes != 0 && own_from.data != own_to.data) {
    context.device().api().copy(own_to.data, own_from.data, own_from.bytes, context.device().stream());
  }
  context.link.exchange(from, to);
  if (home == nullptr) gpu_unpack(context.device(), out, bucket.dtype, bucket.dtype, buffer, {});
}

}  // namespace fusewire
