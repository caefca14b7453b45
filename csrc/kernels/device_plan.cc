#include "kernels/device_plan.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "common/error.h"

namespace fusewire {
namespace {

// Pieces are shorter than 2^31 elements, so that the kernels count inside of them with 32 bits and divide by
// multiplying. A multiple of every tile, so that cutting costs no alignment.
constexpr int64_t kMaxPiece = int64_t{1} << 30;

cuda::Divider divider(int64_t size) {
  const auto d = static_cast<uint32_t>(size);
  const uint32_t shift = d <= 1 ? 0 : static_cast<uint32_t>(std::bit_width(d - 1));
  const uint64_t multiplier = ((uint64_t{1} << 32) * ((uint64_t{1} << shift) - d)) / d + 1;
  return {d, static_cast<uint32_t>(multiplier), shift};
}

uint32_t count_tiles(uint64_t elements, uint64_t tile, uint64_t before) {
  const uint64_t tiles = before + (elements + tile - 1) / tile;
  if (tiles > std::numeric_limits<uint32_t>::max()) {
    throw Error(ErrorCode::kInvalidArgument, "a bucket of more than 2^32 tiles (32 TiB) does not fit one launch");
  }
  return static_cast<uint32_t>(tiles);
}

template <class Record>
size_t bytes_of(const std::vector<Record>& records) {
  return records.size() * sizeof(Record);
}

template <class Record>
void write_at(void* table, size_t offset, const std::vector<Record>& records) {
  if (!records.empty()) std::memcpy(static_cast<std::byte*>(table) + offset, records.data(), bytes_of(records));
}

}  // namespace

TransferPlan::TransferPlan(DataType dtype, DataType wire) : dtype_(dtype), wire_(wire) {
  const uint32_t parts = is_complex(dtype) ? 2 : 1;
  size_ = static_cast<uint32_t>(size_of(dtype)) / parts;
  wire_size_ = static_cast<uint32_t>(size_of(wire)) / parts;
  tile_ = cuda::tile_elements(std::max(size_, wire_size_));
}

void TransferPlan::add(const TensorView& view, int64_t begin, int64_t count, uint64_t offset) {
  if (count <= 0) return;
  std::vector<Dim> dims;
  int64_t parts = 1;
  const auto append = [&](int64_t size, int64_t stride) {
    if (size == 1) return;
    if (!dims.empty() && dims.back().stride == stride * size) {
      dims.back() = {dims.back().size * size, stride};
    } else {
      dims.push_back({size, stride});
    }
  };
  if (is_complex(dtype_)) parts = 2;  // two real numbers, next to each other
  for (size_t i = 0; i < view.sizes.size(); ++i) append(view.sizes[i], view.strides[i] * parts);
  if (parts == 2) append(2, 1);
  begin *= parts;
  count *= parts;
  const auto address = reinterpret_cast<uint64_t>(view.data);
  if (address == 0) return add_run(0, count, offset);
  if (dims.empty() || (dims.size() == 1 && dims[0].stride == 1)) {
    return add_run(address + static_cast<uint64_t>(begin) * size_, count, offset);
  }
  add_strided(address, dims, begin, count, offset);
}

// Cuts along the first dimension whatever has too many dimensions or elements for one piece.
void TransferPlan::add_strided(uint64_t address, const std::vector<Dim>& dims, int64_t begin, int64_t count,
                               uint64_t offset) {
  int64_t inner = 1;
  for (size_t i = 1; i < dims.size(); ++i) inner *= dims[i].size;
  if (dims.size() <= cuda::kMaxDims && inner * dims[0].size <= kMaxPiece) {
    cuda::Layout layout;
    layout.dims = static_cast<int32_t>(dims.size());
    for (size_t i = 0; i < dims.size(); ++i) {
      layout.sizes[i] = divider(dims[i].size);
      layout.strides[i] = dims[i].stride;
    }
    const bool known = !layouts_.empty() && std::memcmp(&layouts_.back(), &layout, sizeof(layout)) == 0;
    if (!known) layouts_.push_back(layout);
    return push({.tensor = address,
                 .buffer = offset,
                 .count = static_cast<uint64_t>(count),
                 .begin = static_cast<uint32_t>(begin),
                 .layout = static_cast<uint32_t>(layouts_.size())});
  }
  const bool whole_rows = dims.size() <= cuda::kMaxDims && inner <= kMaxPiece;
  const int64_t rows = whole_rows ? std::max<int64_t>(1, kMaxPiece / inner) : 1;
  for (int64_t row = begin / inner / rows * rows; count > 0; row += rows) {
    std::vector<Dim> part(dims.begin() + (rows == 1 && dims.size() > 1 ? 1 : 0), dims.end());
    const int64_t here = std::min(rows, dims[0].size - row);
    if (part.size() == dims.size()) part[0].size = here;
    const int64_t first = begin - row * inner;
    const int64_t n = std::min(count, here * inner - first);
    add_strided(address + static_cast<uint64_t>(row * dims[0].stride) * size_, part, first, n, offset);
    begin += n;
    count -= n;
    offset += static_cast<uint64_t>(n) * wire_size_;
  }
}

void TransferPlan::add_run(uint64_t address, int64_t count, uint64_t offset) {
  for (int64_t done = 0; done < count; done += kMaxPiece) {
    const auto at = static_cast<uint64_t>(done);
    push({.tensor = address == 0 ? 0 : address + at * size_,
          .buffer = offset + at * wire_size_,
          .count = static_cast<uint64_t>(std::min(kMaxPiece, count - done))});
  }
}

void TransferPlan::push(const cuda::Piece& piece) {
  first_tiles_.push_back(count_tiles(piece.count, tile_, first_tiles_.back()));
  pieces_.push_back(piece);
}

size_t TransferPlan::table_bytes() const { return cuda::layouts_offset(pieces()) + bytes_of(layouts_); }

void TransferPlan::write(void* table) const {
  write_at(table, 0, first_tiles_);
  write_at(table, cuda::pieces_offset(pieces()), pieces_);
  write_at(table, cuda::layouts_offset(pieces()), layouts_);
}

TransferArgs TransferPlan::args(const void* device_table) const {
  TransferArgs args;
  args.table = device_table;
  args.pieces = pieces();
  args.tiles = tiles();
  args.dtype = dtype_;
  args.wire = wire_;
  return args;
}

SpanPlan::SpanPlan(DataType dtype)
    : dtype_(dtype),
      tile_(cuda::kDotRounds * cuda::kWarpLanes * cuda::kAccessBytes / static_cast<uint32_t>(size_of(dtype))) {}

void SpanPlan::add(uint64_t begin, uint64_t count) {
  const uint32_t first = tiles();
  const uint32_t end = count_tiles(count, tile_, first);
  // One per block that has a warp on it; see adasum.cu. An empty span has none, and its dot products stay as they are.
  const uint32_t slots = end == first ? 0 : (end - 1) / cuda::kWarpsPerBlock - first / cuda::kWarpsPerBlock + 1;
  first_tiles_.push_back(end);
  spans_.push_back({.begin = begin, .count = count, .first_slot = slots_, .slots = slots});
  slots_ += slots;
}

size_t SpanPlan::table_bytes() const { return cuda::pieces_offset(spans()) + bytes_of(spans_); }

void SpanPlan::write(void* table) const {
  write_at(table, 0, first_tiles_);
  write_at(table, cuda::pieces_offset(spans()), spans_);
}

DeviceDotArgs SpanPlan::dot_args(const void* device_table) const {
  DeviceDotArgs args;
  args.table = device_table;
  args.spans = spans();
  args.tiles = tiles();
  args.slots = slots();
  args.dtype = dtype_;
  return args;
}

DeviceCombineArgs SpanPlan::combine_args(const void* device_table) const {
  DeviceCombineArgs args;
  args.table = device_table;
  args.spans = spans();
  args.tiles = tiles();
  args.dtype = dtype_;
  return args;
}

}  // namespace fusewire
