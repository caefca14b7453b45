// Tables for the CUDA kernels, made on the host: which tensors a launch works on, cut into tiles (cuda_tables.h).
//
// A plan is plain data in host memory. Its bytes go to device memory by whatever way the caller likes (a copy on the
// stream that launches); as long as pointers and sizes stay the same, the copy may be used again.
#pragma once

#include <cstdint>
#include <vector>

#include "common/types.h"
#include "kernels/cuda_kernels.h"
#include "kernels/cuda_tables.h"

namespace fusewire {

class TransferPlan {
 public:
  // Tensors of `dtype` to or from a buffer of `wire` (the same, or a narrower floating type).
  TransferPlan(DataType dtype, DataType wire);

  // Logical elements [begin, begin + count) of `view` lie at byte `offset` of the buffer; offsets that are multiples of
  // 16 are fast. A view without data is absent: packing writes the identity, unpacking leaves it out.
  void add(const TensorView& view, int64_t begin, int64_t count, uint64_t offset);

  bool empty() const { return tiles() == 0; }
  uint32_t pieces() const { return static_cast<uint32_t>(pieces_.size()); }
  uint32_t tiles() const { return first_tiles_.back(); }
  size_t table_bytes() const;
  void write(void* table) const;  // table_bytes() bytes, aligned to 16

  // What remains to be said is the buffer, the scale and the stream.
  TransferArgs args(const void* device_table) const;

 private:
  struct Dim {
    int64_t size;
    int64_t stride;
  };
  void add_strided(uint64_t address, const std::vector<Dim>& dims, int64_t begin, int64_t count, uint64_t offset);
  void add_run(uint64_t address, int64_t count, uint64_t offset);
  void push(const cuda::Piece& piece);

  DataType dtype_;
  DataType wire_;
  uint32_t size_;
  uint32_t wire_size_;
  uint32_t tile_;
  std::vector<uint32_t> first_tiles_{0};
  std::vector<cuda::Piece> pieces_;
  std::vector<cuda::Layout> layouts_;
};

// The tensors inside fused buffers that Adasum treats as vectors of their own.
class SpanPlan {
 public:
  explicit SpanPlan(DataType dtype);  // floating

  void add(uint64_t begin, uint64_t count);  // in elements; dots and coefficients come in the order of the calls

  uint32_t spans() const { return static_cast<uint32_t>(spans_.size()); }
  uint32_t tiles() const { return first_tiles_.back(); }
  uint32_t slots() const { return slots_; }
  size_t table_bytes() const;
  void write(void* table) const;

  DeviceDotArgs dot_args(const void* device_table) const;
  DeviceCombineArgs combine_args(const void* device_table) const;

 private:
  DataType dtype_;
  uint32_t tile_;
  uint32_t slots_ = 0;
  std::vector<uint32_t> first_tiles_{0};
  std::vector<cuda::Span> spans_;
};

}  // namespace fusewire
