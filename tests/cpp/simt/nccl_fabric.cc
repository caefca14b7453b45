#include "simt/nccl_fabric.h"

#include <algorithm>
#include <cstring>

#include "simt/plain_kernels.h"

namespace fusewire::testing {

namespace {

DataType data_type(NcclType type) {
  switch (type) {
    case NcclType::kInt8:
      return DataType::kInt8;
    case NcclType::kUint8:
      return DataType::kUInt8;
    case NcclType::kInt32:
      return DataType::kInt32;
    case NcclType::kUint32:
      return DataType::kUInt32;
    case NcclType::kInt64:
      return DataType::kInt64;
    case NcclType::kUint64:
      return DataType::kUInt64;
    case NcclType::kFloat16:
      return DataType::kFloat16;
    case NcclType::kBfloat16:
      return DataType::kBFloat16;
    case NcclType::kFloat32:
      return DataType::kFloat32;
    case NcclType::kFloat64:
      return DataType::kFloat64;
  }
  return DataType::kUInt8;
}

ReduceOp reduce_op(int op) {
  switch (static_cast<NcclOp>(op)) {
    case NcclOp::kSum:
      return ReduceOp::kSum;
    case NcclOp::kProd:
      return ReduceOp::kProduct;
    case NcclOp::kMax:
      return ReduceOp::kMax;
    case NcclOp::kMin:
      return ReduceOp::kMin;
  }
  return ReduceOp::kSum;
}

using Bytes = std::vector<std::byte>;

Bytes read(const void* from, size_t bytes) {
  const auto* begin = static_cast<const std::byte*>(from);
  return {begin, begin + bytes};
}
void write(void* to, const Bytes& bytes, size_t first, size_t count) {
  if (count != 0) std::memcpy(to, bytes.data() + first, count);
}

// Two at a time, each result rounded to the type, in an order that is not that of ranks.
Bytes combine(const std::vector<Bytes>& rows, const NcclCall& call) {
  Bytes total = rows.back();
  for (size_t i = rows.size() - 1; i-- > 0;) {
    DeviceReduceArgs args;
    args.sources[0] = total.data();
    args.sources[1] = rows[i].data();
    args.source_count = 2;
    args.destination = total.data();
    args.dtype = data_type(call.type);
    args.count = total.size() / width_of(call.type);
    args.op = reduce_op(call.detail);
    kPlainKernels.reduce(args);
  }
  return total;
}

}  // namespace

// The mutex is held, and all streams have come so far.
void NcclFabric::perform(const Group& group, const Meeting& meeting) {
  const NcclCall& any = meeting.calls.begin()->second;
  const size_t bytes = any.count * width_of(any.type);
  const auto n = static_cast<size_t>(group.size);
  if (any.name == "send" || any.name == "recv") {
    const auto& [giver, sent] = *std::find_if(meeting.calls.begin(), meeting.calls.end(),
                                              [](const auto& one) { return one.second.name == "send"; });
    for (const auto& [rank, call] : meeting.calls) {
      if (call.name == "recv") write(call.to, read(sent.from, bytes), 0, bytes);
    }
    return;
  }
  if (any.name == "broadcast") {
    const Bytes row = read(meeting.calls.at(any.root).from, bytes);
    for (const auto& [rank, call] : meeting.calls) write(call.to, row, 0, bytes);
    return;
  }
  std::vector<Bytes> rows;
  for (const auto& [rank, call] : meeting.calls) {
    rows.push_back(read(call.from, any.name == "reduce_scatter" ? bytes * n : bytes));
  }
  Bytes result;
  if (any.name == "all_gather") {
    for (const Bytes& row : rows) result.insert(result.end(), row.begin(), row.end());
  } else {
    result = combine(rows, any);
  }
  for (const auto& [rank, call] : meeting.calls) {
    if (any.name == "reduce" && rank != any.root) continue;
    const size_t first = any.name == "reduce_scatter" ? bytes * static_cast<size_t>(rank) : 0;
    write(call.to, result, first, any.name == "reduce_scatter" ? bytes : result.size());
  }
}

}  // namespace fusewire::testing
