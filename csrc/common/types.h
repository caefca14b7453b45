// The vocabulary every other folder shares: element types, reduction operators, operations, and a view of a tensor
// that owns nothing. No torch, no CUDA, no threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "common/dtype.h"

namespace fusewire {

// What a negotiated unit asks for. The first five move data.
enum class OpKind : uint8_t {
  kAllreduce,
  kBroadcast,
  kAllgather,      // along the first dimension, which may differ between ranks
  kAlltoall,       // along the first dimension, cut by each rank's own splits
  kReduceScatter,  // along the first dimension, earlier members get one row more
  kBarrier,
  kJoin,              // "absent for everything from now on", until all ranks have joined
  kAddProcessSet,     // submitted by every rank of the job; the members are in UnitSpec::ranks
  kRemoveProcessSet,  // submitted by every rank of the job
  kAdoptProcessSet,   // the same as an addition, but submitted by the members alone
};
inline constexpr int kOpKindCount = 10;

enum class DeviceType : uint8_t { kCpu, kCuda };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int8_t index = 0;
  bool operator==(const Device&) const = default;
};

// What all ranks that take part in a unit ask for, but for its tensors.
struct Operation {
  OpKind kind = OpKind::kAllreduce;
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1.0;
  double postscale = 1.0;
  int32_t root = 0;  // broadcast
  bool operator==(const Operation&) const = default;
};

using Dims = std::vector<int64_t>;

size_t size_of(DataType type);
std::string_view to_string(DataType type);
std::string_view to_string(ReduceOp op);
std::string_view to_string(OpKind kind);
std::string_view to_string(DeviceType type);
std::string to_string(const Dims& dims);  // "[2, 3]"

bool moves_data(OpKind kind);
bool reduces(OpKind kind);       // applies a ReduceOp: allreduce, reduce-scatter
bool changes_sets(OpKind kind);  // adds or removes a process set
bool has_extents(OpKind kind);   // ranks bring first dimensions of their own: allgather, alltoall

bool is_floating(DataType type);  // fp16, bf16, fp32, fp64
bool is_complex(DataType type);
bool is_integer(DataType type);  // all integers, bool excluded

// Whether `op` has a meaning for `type`; `allowed_ops` is the text an error shows ("Sum, Average, ...").
bool supports(DataType type, ReduceOp op);
std::string allowed_ops(DataType type);

int64_t numel(const Dims& sizes);

// A strided window on memory somebody else keeps alive. Strides count elements. `data == nullptr` with a non-zero
// numel means "absent": nothing to read (as an input) or nowhere to write (as an output).
struct TensorView {
  void* data = nullptr;
  DataType dtype = DataType::kFloat32;
  Device device;
  Dims sizes;
  Dims strides;
  // CUDA: the event (recorded already) after which `data` may be read and written; null on CPU, and where there is
  // nothing to wait for. Whoever keeps `data` alive keeps it, too.
  void* ready_event = nullptr;

  int64_t numel() const { return fusewire::numel(sizes); }
  bool is_contiguous() const;  // row-major without gaps: logical order is memory order
};

TensorView contiguous_view(void* data, DataType dtype, Dims sizes);

}  // namespace fusewire
