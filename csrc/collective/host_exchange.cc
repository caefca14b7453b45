#include "collective/host_exchange.h"

namespace fusewire {

std::vector<std::byte> exchange_on_host(Backend& plane, int size, std::span<const std::byte> mine) {
  const auto bytes = static_cast<int64_t>(mine.size());
  std::vector<std::byte> all(mine.size() * static_cast<size_t>(size));
  Bucket bucket;
  bucket.kind = OpKind::kAllgather;
  bucket.dtype = bucket.wire = DataType::kUInt8;
  bucket.elements = bytes;
  Segment segment;
  segment.input = contiguous_view(const_cast<std::byte*>(mine.data()), DataType::kUInt8, {bytes});  // only read
  segment.output = contiguous_view(all.data(), DataType::kUInt8, {bytes * size});
  segment.counts.assign(static_cast<size_t>(size), bytes);
  bucket.segments.push_back(std::move(segment));
  plane.run(bucket);
  return all;
}

}  // namespace fusewire
