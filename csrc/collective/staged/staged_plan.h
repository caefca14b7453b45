// How a bucket of CUDA tensors is cut for its way through host memory, the same on all ranks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "collective/backend.h"
#include "collective/gpu_transfer.h"

namespace fusewire {

// Note [Staged chunks]
// A chunk is some whole tensors, or a piece of one that is too large to share. Chunk k of K of a tensor is the k-th
// piece of each of its parts (backend.h Note [Counts]), so that in every chunk every member has its share of the work:
// cut in the order of its elements, a reduce-scatter would be one member's turn after the other. An Adasum's tensors
// are never cut, because its coefficients belong to whole ones. Where to cut follows from what all ranks know alike.
//
// A chunk's buffer is laid out alike in device and in pinned memory: what this rank gives, from 0 on, and what it gets,
// from `out_begin` on. Where everybody's input and output have the same elements that is one place, and the collective
// runs in it.
struct StagedSegment {
  int64_t in_count = 0;  // elements
  int64_t out_count = 0;
  size_t in_offset = 0;  // bytes in the buffer
  size_t out_offset = 0;
  bool present = false;  // there is an input
  bool wanted = false;   // there is an output
  std::vector<int64_t> counts{};
};

struct StagedChunk {
  std::vector<GpuPiece> in;   // what is packed on this rank
  std::vector<GpuPiece> out;  // what is unpacked
  std::vector<StagedSegment> segments;
  int64_t first = 0;  // about where in the bucket's elements it begins
  int64_t elements = 0;
  size_t in_bytes = 0;
  size_t out_begin = 0;
  size_t out_bytes = 0;
  bool up = false;  // results come from the host: a broadcast's root has its own on the device

  size_t bytes() const { return out_begin + out_bytes; }
};

class StagedPlan {
 public:
  // `bucket` must outlive the plan. Throws Error(kInternal) where it contradicts itself.
  StagedPlan(const Bucket& bucket, int size, int rank, size_t chunk_bytes);

  const std::vector<StagedChunk>& chunks() const { return chunks_; }
  DataType wire() const { return wire_; }         // of the buffers, and of what the CPU plane sees
  double factor() const { return factor_; }       // of packing
  Operation operation() const { return inner_; }  // what the CPU plane is asked for
  size_t most_bytes() const;                      // of a chunk

 private:
  struct Run {
    int64_t begin;
    int64_t count;
  };
  struct Parts {
    std::vector<Run> in;   // of the input, by who gets them
    std::vector<Run> out;  // of the output, by who gives them
    std::vector<int64_t> counts;
    int64_t elements = 0;  // the most that a member gives or gets
  };

  Parts parts_of(const Segment& segment) const;
  void append(const Segment& segment, const Parts& parts, int64_t piece, int64_t pieces);
  void lay_out(const std::vector<Run>& runs, const TensorView* view, int64_t piece, int64_t pieces, size_t offset,
               std::vector<GpuPiece>& out) const;
  int64_t cut(int64_t count, int64_t piece, int64_t pieces) const;
  int64_t count_of(const std::vector<Run>& runs, int64_t piece, int64_t pieces) const;
  void close();

  const Bucket& bucket_;
  const int size_;
  const int rank_;
  DataType wire_;
  int64_t width_;
  double factor_;
  Operation inner_;
  bool shared_;  // one place for what is given and got
  StagedChunk open_;
  int64_t first_ = 0;
  std::vector<StagedChunk> chunks_;
};

}  // namespace fusewire
