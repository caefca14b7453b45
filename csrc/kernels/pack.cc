// Between tensors of any strides and contiguous slots, in logical order.
//
// Dimensions are first merged where their strides allow it, so that a contiguous tensor has one dimension and a
// transposed matrix or a channels_last gradient two or three. What is left is walked as rows of the last dimension and,
// where the last two form a transpose, in tiles that use every cache line completely before it is evicted.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#include "kernels/kernels.h"

namespace fusewire {
namespace {

struct Dim {
  int64_t size;
  int64_t stride;  // in elements
};

// The view's dimensions, merged. Views of up to eight dimensions need no allocation.
class Shape {
 public:
  explicit Shape(const TensorView& view) {
    if (view.sizes.size() > inline_.size()) {
      spill_.resize(view.sizes.size());
      dims_ = spill_.data();
    }
    for (size_t i = 0; i < view.sizes.size(); ++i) {
      const Dim dim{view.sizes[i], view.strides[i]};
      if (dim.size == 1) continue;
      if (rank_ > 0 && dims_[rank_ - 1].stride == dim.stride * dim.size) {
        dims_[rank_ - 1] = {dims_[rank_ - 1].size * dim.size, dim.stride};
      } else {
        dims_[rank_++] = dim;
      }
    }
    if (rank_ == 0) dims_[rank_++] = {1, 1};
  }
  Shape(const Shape&) = delete;
  Shape& operator=(const Shape&) = delete;

  int rank() const { return rank_; }
  const Dim& operator[](int i) const { return dims_[i]; }

  // Where logical element `index` lies, counted in elements from the first.
  int64_t offset_of(int64_t index) const {
    int64_t offset = 0;
    for (int i = rank_; i-- > 0;) {
      offset += index % dims_[i].size * dims_[i].stride;
      index /= dims_[i].size;
    }
    return offset;
  }

 private:
  int rank_ = 0;
  std::array<Dim, 8> inline_;
  std::vector<Dim> spill_;
  Dim* dims_ = inline_.data();
};

struct Bytes16 {
  uint64_t low, high;
};

// A contiguous piece on one side and the same elements in the slot on the other. The slot may hold a narrower type.
struct Slot {
  DataType dtype;
  DataType wire;
  double factor;
  size_t dtype_size = size_of(dtype);
  size_t wire_size = size_of(wire);
  const CpuKernels& kernels = cpu_kernels();

  bool converts() const { return dtype != wire || factor != 1.0; }

  void put(const std::byte* tensor, std::byte* slot, int64_t n) const {
    if (converts()) {
      kernels.cast(dtype, tensor, wire, slot, static_cast<size_t>(n), factor);
    } else {
      kernels.copy(slot, tensor, static_cast<size_t>(n) * dtype_size);
    }
  }
  void take(std::byte* tensor, const std::byte* slot, int64_t n) const {
    if (converts()) {
      kernels.cast(wire, slot, dtype, tensor, static_cast<size_t>(n), 1.0);
    } else {
      kernels.copy(tensor, slot, static_cast<size_t>(n) * dtype_size);
    }
  }
};

// The two directions. `Tensor` and `Slot` memory swap the roles of source and destination, the walk stays the same.
struct Gather {
  using Memory = const std::byte*;
  using Wire = std::byte*;
  static void contiguous(const Slot& slot, Memory tensor, Wire wire, int64_t n) { slot.put(tensor, wire, n); }
  template <class Words>
  static void move(Memory tensor, std::byte* row) {
    std::memcpy(row, tensor, sizeof(Words));
  }
  static constexpr bool kGather = true;
};
struct Scatter {
  using Memory = std::byte*;
  using Wire = const std::byte*;
  static void contiguous(const Slot& slot, Memory tensor, Wire wire, int64_t n) { slot.take(tensor, wire, n); }
  template <class Words>
  static void move(Memory tensor, const std::byte* row) {
    std::memcpy(tensor, row, sizeof(Words));
  }
  static constexpr bool kGather = false;
};

// A block of `rows` x `columns` logical elements; the slot holds them row by row. Words are elements.
template <class Way, class Word>
class Block {
 public:
  Block(const Slot& slot, Dim row, Dim column) : slot_(slot), row_(row), column_(column) {}

  void move(typename Way::Memory tensor, typename Way::Wire wire, int64_t rows, int64_t columns) const {
    if (column_.stride == 1 && (columns >= kDirectColumns || slot_.converts())) {
      for (int64_t r = 0; r < rows; ++r) Way::contiguous(slot_, tensor + at(r, 0), wire + packed(r * columns), columns);
    } else if (!slot_.converts() && !transposed()) {
      for (int64_t r = 0; r < rows; ++r) strided_row(tensor + at(r, 0), wire + packed(r * columns), columns);
    } else {
      tiles(tensor, wire, rows, columns);
    }
  }

 private:
  static constexpr int64_t kSize = sizeof(Word);
  static constexpr int64_t kDirectColumns = 64 / kSize;
  // Tiles are square, and two cache lines wide so that lines are used up on both sides.
  static constexpr int64_t kTile = std::max<int64_t>(16, 128 / kSize);

  int64_t at(int64_t r, int64_t c) const { return (r * row_.stride + c * column_.stride) * kSize; }
  int64_t packed(int64_t elements) const { return elements * static_cast<int64_t>(slot_.wire_size); }
  bool transposed() const { return row_.stride < column_.stride; }

  // Elements of one row between the tensor and contiguous memory of the tensor's own type.
  template <class Row>
  void strided_row(typename Way::Memory tensor, Row row, int64_t n) const {
    const int64_t step = column_.stride * kSize;
    for (int64_t c = 0; c < n; ++c) Way::template move<Word>(tensor + c * step, row + c * kSize);
  }

  void tiles(typename Way::Memory tensor, typename Way::Wire wire, int64_t rows, int64_t columns) const {
    alignas(64) std::byte tile[kTile * kTile * kSize];
    for (int64_t c = 0; c < columns; c += kTile) {
      const int64_t width = std::min(kTile, columns - c);
      for (int64_t r = 0; r < rows; r += kTile) {
        const int64_t height = std::min(kTile, rows - r);
        const bool more_rows = r + kTile < rows;
        const auto next = tensor + (more_rows ? at(r + kTile, c) : at(0, c + kTile));
        const int64_t next_width = more_rows ? width : std::min(kTile, columns - c - kTile);
        const auto to_slot = [&](int64_t i) { return wire + packed((r + i) * columns + c); };
        if constexpr (Way::kGather) {
          sweep(tensor + at(r, c), tile, height, width, next, next_width);
          for (int64_t i = 0; i < height; ++i) row(tile + i * kTile * kSize, to_slot(i), width);
        } else {
          for (int64_t i = 0; i < height; ++i) row(tile + i * kTile * kSize, to_slot(i), width);
          sweep(tensor + at(r, c), tile, height, width, next, next_width);
        }
      }
    }
  }

  // One row of a tile, to or from the slot.
  void row(std::byte* tile, typename Way::Wire wire, int64_t width) const {
    if (width == kTile && !slot_.converts()) {
      Way::template move<std::array<Word, kTile>>(tile, wire);
    } else {
      Way::contiguous(slot_, tile, wire, width);
    }
  }

  // Between the tensor and a tile, whose rows are kTile words apart. In a transpose the walk follows the tensor's
  // memory; its lines are far apart, in other pages, where no prefetcher follows: those of the next tile are called for
  // meanwhile.
  void sweep(typename Way::Memory tensor, std::byte* tile, int64_t height, int64_t width, typename Way::Memory next,
             int64_t next_width) const {
    if (!transposed()) {
      for (int64_t r = 0; r < height; ++r) strided_row(tensor + at(r, 0), tile + r * kTile * kSize, width);
      return;
    }
    int64_t c = 0;
    if constexpr (kLanes > 1) {
      if (row_.stride == 1) {
        for (; c + kLanes <= width; c += kLanes) {
          for (int64_t ahead = c; ahead < std::min(c + kLanes, next_width); ++ahead) prefetch(next + at(0, ahead));
          int64_t r = 0;
          for (; r + kLanes <= height; r += kLanes) square(tensor + at(r, c), tile + (r * kTile + c) * kSize);
          for (; r < height; ++r) strided_row(tensor + at(r, c), tile + (r * kTile + c) * kSize, kLanes);
        }
      }
    }
    for (; c < width; ++c) {
      if (c < next_width) prefetch(next + at(0, c));
      for (int64_t r = 0; r < height; ++r) Way::template move<Word>(tensor + at(r, c), tile + (r * kTile + c) * kSize);
    }
  }

  static void prefetch(typename Way::Memory line) {
    __builtin_prefetch(line, Way::kGather ? 0 : 1);
    __builtin_prefetch(line + 64, Way::kGather ? 0 : 1);
  }

  // kLanes x kLanes elements through registers: kLanes columns of the tensor are rows of the tile turned over. Each
  // round interleaves the first half of the vectors with the second; after log2(kLanes) rounds row and column numbers
  // have changed places.
  static constexpr int kLanes = kSize < 16 ? static_cast<int>(16 / kSize) : 1;
  void square(typename Way::Memory tensor, std::byte* tile) const {
    using Lane = std::conditional_t<kLanes == 1, uint64_t, Word>;  // vectors of 16-byte words do not exist
    typedef Lane Vector __attribute__((vector_size(kLanes * sizeof(Lane))));
    Vector a[kLanes];
    Vector b[kLanes];
    for (int i = 0; i < kLanes; ++i)
      std::memcpy(&a[i], Way::kGather ? tensor + at(0, i) : tile + i * kTile * kSize, 16);
    Vector low;
    Vector high;
    for (int i = 0; i < kLanes; ++i) {
      low[i] = static_cast<Lane>(i / 2 + (i % 2 == 0 ? 0 : kLanes));
      high[i] = static_cast<Lane>(low[i] + kLanes / 2);
    }
    for (int round = 1; round < kLanes; round *= 2) {
      for (int i = 0; i < kLanes / 2; ++i) {
        b[2 * i] = __builtin_shuffle(a[i], a[i + kLanes / 2], low);
        b[2 * i + 1] = __builtin_shuffle(a[i], a[i + kLanes / 2], high);
      }
      for (int i = 0; i < kLanes; ++i) a[i] = b[i];
    }
    for (int i = 0; i < kLanes; ++i) {
      if constexpr (Way::kGather) {
        std::memcpy(tile + i * kTile * kSize, &a[i], 16);
      } else {
        std::memcpy(tensor + at(0, i), &a[i], 16);
      }
    }
  }

  const Slot& slot_;
  Dim row_;
  Dim column_;
};

// Cuts [begin, begin + count) into an incomplete row, blocks of whole rows, and another incomplete row.
template <class Way, class Word>
void walk(const Slot& slot, const Shape& shape, typename Way::Memory tensor, typename Way::Wire wire, int64_t begin,
          int64_t count) {
  const Dim column = shape[shape.rank() - 1];
  const Dim row = shape.rank() > 1 ? shape[shape.rank() - 2] : Dim{1, 0};
  const Block<Way, Word> block(slot, row, column);
  const auto move = [&](int64_t rows, int64_t columns) {
    const int64_t offset = shape.offset_of(begin) * static_cast<int64_t>(sizeof(Word));
    block.move(tensor + offset, wire, rows, columns);
    wire += rows * columns * static_cast<int64_t>(slot.wire_size);
    begin += rows * columns;
    count -= rows * columns;
  };
  while (count > 0) {
    const int64_t in_row = begin % column.size;
    if (in_row != 0 || count < column.size) {
      move(1, std::min(count, column.size - in_row));
    } else {
      const int64_t in_block = begin / column.size % row.size;
      move(std::min(count / column.size, row.size - in_block), column.size);
    }
  }
}

template <class Way>
void transfer(const Slot& slot, const TensorView& view, typename Way::Memory tensor, typename Way::Wire wire,
              int64_t begin, int64_t count) {
  if (count <= 0) return;
  const Shape shape(view);
  if (shape.rank() == 1 && shape[0].stride == 1) {
    Way::contiguous(slot, tensor + begin * static_cast<int64_t>(slot.dtype_size), wire, count);
    return;
  }
  switch (slot.dtype_size) {
    case 1:
      return walk<Way, uint8_t>(slot, shape, tensor, wire, begin, count);
    case 2:
      return walk<Way, uint16_t>(slot, shape, tensor, wire, begin, count);
    case 4:
      return walk<Way, uint32_t>(slot, shape, tensor, wire, begin, count);
    case 8:
      return walk<Way, uint64_t>(slot, shape, tensor, wire, begin, count);
    default:
      return walk<Way, Bytes16>(slot, shape, tensor, wire, begin, count);
  }
}

}  // namespace

void pack(const TensorView& view, int64_t begin, int64_t count, DataType wire, double factor, void* destination) {
  const Slot slot{.dtype = view.dtype, .wire = wire, .factor = factor};
  transfer<Gather>(slot, view, static_cast<const std::byte*>(view.data), static_cast<std::byte*>(destination), begin,
                   count);
}

void unpack(const void* source, DataType wire, const TensorView& view, int64_t begin, int64_t count) {
  const Slot slot{.dtype = view.dtype, .wire = wire, .factor = 1.0};
  transfer<Scatter>(slot, view, static_cast<std::byte*>(view.data), static_cast<const std::byte*>(source), begin,
                    count);
}

}  // namespace fusewire
