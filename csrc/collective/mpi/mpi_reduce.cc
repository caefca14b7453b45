// Reductions: every element is reduced by one member, out of everybody's contributions in rank order, by the project's
// kernels.
//
// Note [Why not MPI_Allreduce]
// MPI combines two values at a time, in an order that is the library's own. fp16 would be rounded n - 1 times, fp32
// without a wide accumulator, the mean of large numbers would overflow, and another library, number of ranks or message
// size would give other bits. So messages are MPI's and arithmetic is ours: the result is bit for bit what shared
// memory gives, the same on all ranks and in all runs. The bytes on the wire are the same: 2 (n - 1) / n of the bucket
// per rank, which is the least there can be. A message can also be given up when its peer dies; a collective cannot.
#include <algorithm>

#include "collective/mpi/mpi_context.h"
#include "collective/part_counts.h"

namespace fusewire {
namespace {

using Purpose = MpiLink::Purpose;

Purpose give(int64_t step) { return step % 2 == 0 ? MpiLink::kGive : MpiLink::kGiveNext; }
Purpose give_back(int64_t step) { return step % 2 == 0 ? MpiLink::kReturn : MpiLink::kReturnNext; }

// Out of context.sources.
void reduce(MpiContext& context, const Reduction& reduction, DataType dtype, int64_t count, std::byte* destination) {
  ReduceArgs args;
  args.sources = context.sources.data();
  args.source_count = context.size();
  args.destination = destination;
  args.count = static_cast<size_t>(count);
  args.dtype = dtype;
  args.op = reduction.op;
  args.scale = reduction.scale;
  cpu_kernels().reduce(args);
}

// The part of a row that one member reduces in one step.
struct Slice {
  BucketCursor* row;
  int64_t begin;
  int64_t end;

  bool empty() const { return begin >= end; }
  size_t bytes() const { return empty() ? 0 : static_cast<size_t>(end - begin) * row->wire_bytes(); }
};

// Note [Two steps in flight]
// Step k: everybody gives its contributions to slice (k, r) to its owner r; r reduces; in an allreduce r returns the
// result. While the contributions of step k travel, the owner reduces step k-1. The order of posts is the same on all
// ranks (give k, return k-1, give k+1, ...), which is what matches messages to receives. Staging of step k is that of
// step k-2, whose messages have all been waited for by then. In place, a result may arrive where a contribution was
// sent from: it is received only after that send has completed.
class SlicePipeline {
 public:
  // slice(owner, step) for steps from 0; `slice_elements` is the longest there is.
  template <typename SliceOf>
  void run(int64_t steps, bool distribute, SliceOf&& slice_of) {
    for (int64_t step = 0; step < steps + 2; ++step) {
      if (distribute && step >= 2) collect(step - 2, slice_of);
      if (step < steps) offer(step, slice_of);
      if (step >= 1 && step <= steps) {
        own(step - 1, slice_of(context_.rank(), step - 1));
        if (distribute) spread(step - 1, slice_of);
      }
    }
  }

  SlicePipeline(MpiContext& context, const Reduction& reduction, DataType wire, int64_t slice_elements)
      : context_(context),
        reduction_(reduction),
        wire_(wire),
        slice_bytes_(static_cast<size_t>(slice_elements) * size_of(wire)) {
    for (size_t i = 0; i < context_.staging.size(); ++i) {
      context_.stage(i, slice_bytes_ * static_cast<size_t>(context_.size()));
    }
  }

 private:
  // Of contributions to `rank` and of its results; of what came from `rank`.
  std::byte* outgoing(int64_t step, int rank) { return staging(step % 2, rank); }
  std::byte* incoming(int64_t step, int rank) { return staging(2 + step % 2, rank); }
  std::byte* staging(int64_t which, int rank) {
    return context_.staging[static_cast<size_t>(which)].data() + slice_bytes_ * static_cast<size_t>(rank);
  }

  template <typename SliceOf>
  void offer(int64_t step, SliceOf& slice_of) {
    const auto trace = context_.link.watch().step(ChunkStep::kPack);
    const size_t mine = slice_of(context_.rank(), step).bytes();
    for (int distance = 1; distance < context_.size(); ++distance) {
      const int from = context_.before(distance);
      context_.link.receive(give(step), from, incoming(step, from), mine);
    }
    for (int distance = 1; distance < context_.size(); ++distance) {
      const int to = context_.after(distance);
      const Slice slice = slice_of(to, step);
      if (!slice.empty())
        context_.link.send(give(step), to, slice.row->in_order(slice.begin, slice.end, outgoing(step, to)),
                           slice.bytes());
    }
  }

  void own(int64_t step, const Slice& slice) {
    const auto trace = context_.link.watch().step(ChunkStep::kReduce);
    const int rank = context_.rank();
    const std::byte* mine = slice.empty() ? nullptr : slice.row->in_order(slice.begin, slice.end, outgoing(step, rank));
    context_.link.wait(give(step));
    if (slice.empty()) return;
    for (int r = 0; r < context_.size(); ++r) {
      context_.sources[static_cast<size_t>(r)] = r == rank ? mine : incoming(step, r);
    }
    std::byte* const there = slice.row->output_at(slice.begin, slice.end);
    result_ = there != nullptr ? there : outgoing(step, rank);
    reduce(context_, reduction_, wire_, slice.end - slice.begin, result_);
    if (there == nullptr) slice.row->scatter(result_, slice.begin, slice.end);
  }

  template <typename SliceOf>
  void spread(int64_t step, SliceOf& slice_of) {
    for (int distance = 1; distance < context_.size(); ++distance) {
      const int from = context_.before(distance);
      const Slice slice = slice_of(from, step);
      if (slice.empty()) continue;
      std::byte* const there = slice.row->output_at(slice.begin, slice.end);
      context_.link.receive(give_back(step), from, there != nullptr ? there : outgoing(step, from), slice.bytes());
    }
    const size_t bytes = slice_of(context_.rank(), step).bytes();
    for (int distance = 1; distance < context_.size(); ++distance) {
      context_.link.send(give_back(step), context_.after(distance), result_, bytes);
    }
  }

  template <typename SliceOf>
  void collect(int64_t step, SliceOf& slice_of) {
    const auto trace = context_.link.watch().step(ChunkStep::kUnpack);
    context_.link.wait(give_back(step));
    for (int from = 0; from < context_.size(); ++from) {
      const Slice slice = slice_of(from, step);
      if (from == context_.rank() || slice.empty()) continue;
      if (slice.row->output_at(slice.begin, slice.end) == nullptr) {
        slice.row->scatter(outgoing(step, from), slice.begin, slice.end);
      }
    }
  }

  MpiContext& context_;
  const Reduction& reduction_;
  const DataType wire_;
  const size_t slice_bytes_;
  std::byte* result_ = nullptr;
};

}  // namespace

std::byte* mpi_gather_everything(MpiContext& context) {
  const auto trace = context.link.watch().step(ChunkStep::kPack);
  BucketCursor& cursor = context.cursor;
  const size_t bytes = static_cast<size_t>(cursor.elements()) * cursor.wire_bytes();
  std::byte* const blocks = context.stage(0, bytes * static_cast<size_t>(context.size()));
  cursor.gather(0, cursor.elements(), blocks);
  for (int there = 1; there < context.size(); there *= 2) {
    const size_t more = static_cast<size_t>(std::min(there, context.size() - there)) * bytes;
    context.link.receive(MpiLink::kGive, context.after(there), blocks + static_cast<size_t>(there) * bytes, more);
    context.link.send(MpiLink::kGive, context.before(there), blocks, more);
    context.link.wait(MpiLink::kGive);
  }
  for (int block = 0; block < context.size(); ++block) {
    context.sources[static_cast<size_t>(context.after(block))] = blocks + static_cast<size_t>(block) * bytes;
  }
  return blocks;
}

void mpi_allreduce_at_once(MpiContext& context, const Reduction& reduction) {
  BucketCursor& cursor = context.cursor;
  const int64_t count = cursor.elements();
  std::byte* const blocks = mpi_gather_everything(context);
  const auto trace = context.link.watch().step(ChunkStep::kReduce);
  if (std::byte* const there = cursor.output_at(0, count)) {
    return reduce(context, reduction, cursor.wire(), count, there);
  }
  reduce(context, reduction, cursor.wire(), count, blocks);
  cursor.scatter(blocks, 0, count);
}

void mpi_allreduce_sliced(MpiContext& context, const Reduction& reduction) {
  BucketCursor& cursor = context.cursor;
  const int64_t count = cursor.elements();
  const int size = context.size();
  // A bucket that is smaller than one message for each rank is shared out evenly.
  const auto line = static_cast<int64_t>(MpiContext::kLine / cursor.wire_bytes());
  const int64_t share = (count + size - 1) / size;
  const int64_t slice = std::min(context.message_elements(cursor.wire_bytes()), (share + line - 1) / line * line);
  const int64_t stride = slice * size;
  SlicePipeline(context, reduction, cursor.wire(), slice)
      .run((count + stride - 1) / stride, true, [&](int owner, int64_t step) {
        const int64_t begin = step * stride + owner * slice;
        return Slice{&cursor, begin, std::min(begin + slice, count)};
      });
}

void mpi_reduce_scatter(MpiContext& context, const Bucket& given, const ReductionPlan& plan) {
  const int size = context.size();
  const DetachedBucket detached(given, size, context.rank());
  const Bucket& bucket = detached.get();
  const std::vector<PartCounts> counts = part_counts(bucket, size, context.rank());
  int64_t longest = 0;
  for (int owner = 0; owner < size; ++owner) {
    BucketCursor& row = context.rows[static_cast<size_t>(owner)];
    row.start(plan.format, 0, 0);
    for (size_t s = 0; s < bucket.segments.size(); ++s) {
      row.append(&bucket.segments[s].input, counts[s].in_offset(context.rank(), owner),
                 owner == context.rank() ? &bucket.segments[s].output : nullptr, 0, counts[s](context.rank(), owner));
    }
    longest = std::max(longest, row.elements());
  }
  const int64_t slice = std::min(context.message_elements(size_of(plan.format.wire)), longest);
  if (slice == 0) return;
  SlicePipeline(context, plan.reduction, plan.format.wire, slice)
      .run((longest + slice - 1) / slice, false, [&](int owner, int64_t step) {
        BucketCursor& row = context.rows[static_cast<size_t>(owner)];
        const int64_t begin = step * slice;
        return Slice{&row, begin, std::min(begin + slice, row.elements())};
      });
}

}  // namespace fusewire
