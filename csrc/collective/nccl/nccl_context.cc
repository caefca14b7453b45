#include "collective/nccl/nccl_context.h"

#include <algorithm>

#include "collective/bucket_cursor.h"

namespace fusewire {
namespace {

constexpr uint64_t kAlignment = 16;  // what the kernels read at once

uint64_t aligned(uint64_t offset) { return (offset + kAlignment - 1) / kAlignment * kAlignment; }

}  // namespace

void GpuRow::append(const TensorView* input, int64_t in_begin, const TensorView* output, int64_t out_begin,
                    int64_t count) {
  if (count == 0) return;
  const uint64_t offset = begin + aligned(end - begin);
  if (input != nullptr) in.push_back({input, in_begin, count, offset});
  if (output != nullptr) out.push_back({output, out_begin, count, offset});
  end = offset + static_cast<uint64_t>(count) * width;
}

std::vector<GpuRow> cut_rows(const Bucket& bucket, DataType wire, size_t most) {
  const size_t width = size_of(wire);
  std::vector<GpuRow> rows;
  int64_t elements = 0;
  const auto room = [&] {  // for elements at the end of the last row
    const uint64_t used = rows.empty() ? most : aligned(rows.back().bytes());
    return used >= most ? int64_t{0} : static_cast<int64_t>((most - used) / width);
  };
  for (const Segment& segment : bucket.segments) {
    const int64_t count = segment.input.numel();
    if (count != segment.output.numel()) contradiction("input and output of a tensor differ in size");
    elements += count;
    for (int64_t done = 0; done < count;) {
      // A tensor that fits into a row of its own is not cut.
      if (room() == 0 || (room() < count - done && static_cast<size_t>(count) * width <= most)) {
        rows.emplace_back(width, 0);
      }
      const int64_t part = std::min(count - done, std::max<int64_t>(room(), 1));
      rows.back().append(&segment.input, done, &segment.output, done, part);
      done += part;
    }
  }
  if (elements != bucket.elements) contradiction("its element count is not the sum of its tensors'");
  return rows;
}

bool is_large(const Bucket& bucket, DataType wire, const NcclTuning& tuning) {
  return bucket.segments.size() == 1 && static_cast<size_t>(bucket.elements) * size_of(wire) >= tuning.direct_bytes;
}

std::byte* flat_at(const TensorView& view, int64_t begin) {
  if (view.data == nullptr || !view.is_contiguous()) return nullptr;
  return static_cast<std::byte*>(view.data) + static_cast<size_t>(begin) * size_of(view.dtype);
}

void gpu_scale(GpuDevice& device, const void* from, void* to, int64_t count, DataType dtype, const GpuScale& scale) {
  DeviceReduceArgs args;
  args.sources[0] = from;
  args.source_count = 1;
  args.destination = to;
  args.count = static_cast<uint64_t>(count);
  args.dtype = dtype;
  args.factor = scale.factor;
  args.divisor = scale.divisor;
  args.stream = device.stream();
  device.api().reduce(args);
}

void gpu_reduce(GpuDevice& device, const std::vector<const void*>& from, void* to, size_t count, DataType dtype,
                const Reduction& reduction) {
  DeviceReduceArgs args;
  args.destination = to;
  args.count = count;
  args.dtype = dtype;
  args.op = reduction.op;
  args.stream = device.stream();
  for (size_t done = 0; done < from.size();) {
    args.source_count = 0;
    if (done > 0) args.sources[args.source_count++] = to;
    while (done < from.size() && args.source_count < kMaxReduceSources) {
      args.sources[args.source_count++] = from[done++];
    }
    if (done == from.size()) {
      args.factor = reduction.scale.factor;
      args.divisor = reduction.scale.divisor;
    }
    device.api().reduce(args);
  }
}

}  // namespace fusewire
