#include "common/types.h"

#include <array>
#include <utility>

namespace fusewire {
namespace {

enum class Family : uint8_t { kInteger, kFloating, kBool, kComplex };

struct TypeInfo {
  std::string_view name;
  uint8_t size;
  Family family;
};

// Indexed by DataType.
constexpr std::array<TypeInfo, kDataTypeCount> kTypes = {{
    {"uint8", 1, Family::kInteger},
    {"int8", 1, Family::kInteger},
    {"uint16", 2, Family::kInteger},
    {"int16", 2, Family::kInteger},
    {"uint32", 4, Family::kInteger},
    {"int32", 4, Family::kInteger},
    {"uint64", 8, Family::kInteger},
    {"int64", 8, Family::kInteger},
    {"float16", 2, Family::kFloating},
    {"bfloat16", 2, Family::kFloating},
    {"float32", 4, Family::kFloating},
    {"float64", 8, Family::kFloating},
    {"bool", 1, Family::kBool},
    {"complex64", 8, Family::kComplex},
    {"complex128", 16, Family::kComplex},
}};

constexpr std::array<std::string_view, kReduceOpCount> kOpNames = {"Sum", "Average", "Min", "Max", "Product", "Adasum"};
constexpr std::array<std::string_view, kOpKindCount> kKindNames = {
    "allreduce", "broadcast", "allgather",       "alltoall",           "reducescatter",
    "barrier",   "join",      "add_process_set", "remove_process_set", "adopt_process_set"};

const TypeInfo& info(DataType type) { return kTypes.at(static_cast<size_t>(type)); }

}  // namespace

size_t size_of(DataType type) { return info(type).size; }
std::string_view to_string(DataType type) { return info(type).name; }
std::string_view to_string(ReduceOp op) { return kOpNames.at(static_cast<size_t>(op)); }
std::string_view to_string(OpKind kind) { return kKindNames.at(static_cast<size_t>(kind)); }
std::string_view to_string(DeviceType type) { return type == DeviceType::kCpu ? "cpu" : "cuda"; }

std::string to_string(const Dims& dims) {
  std::string text = "[";
  for (size_t i = 0; i < dims.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(dims[i]);
  }
  return text + "]";
}

bool moves_data(OpKind kind) { return kind <= OpKind::kReduceScatter; }
bool reduces(OpKind kind) { return kind == OpKind::kAllreduce || kind == OpKind::kReduceScatter; }
bool has_extents(OpKind kind) { return kind == OpKind::kAllgather || kind == OpKind::kAlltoall; }
bool changes_sets(OpKind kind) { return kind >= OpKind::kAddProcessSet; }

bool is_floating(DataType type) { return info(type).family == Family::kFloating; }
bool is_complex(DataType type) { return info(type).family == Family::kComplex; }
bool is_integer(DataType type) { return info(type).family == Family::kInteger; }

bool supports(DataType type, ReduceOp op) {
  switch (info(type).family) {
    case Family::kInteger:
      return op != ReduceOp::kAdasum;
    case Family::kFloating:
      return true;
    case Family::kBool:
      return op != ReduceOp::kAverage && op != ReduceOp::kAdasum;
    case Family::kComplex:
      return op == ReduceOp::kSum || op == ReduceOp::kAverage;
  }
  return false;
}

std::string allowed_ops(DataType type) {
  std::string text;
  for (int i = 0; i < kReduceOpCount; ++i) {
    const auto op = static_cast<ReduceOp>(i);
    if (!supports(type, op)) continue;
    if (!text.empty()) text += ", ";
    text += to_string(op);
  }
  return text;
}

int64_t numel(const Dims& sizes) {
  int64_t n = 1;
  for (const int64_t s : sizes) n *= s;
  return n;
}

bool TensorView::is_contiguous() const {
  int64_t expected = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    if (sizes[i] == 0) return true;
    if (sizes[i] == 1) continue;
    if (strides[i] != expected) return false;
    expected *= sizes[i];
  }
  return true;
}

TensorView contiguous_view(void* data, DataType dtype, Dims sizes) {
  TensorView view;
  view.data = data;
  view.dtype = dtype;
  view.strides.resize(sizes.size());
  int64_t stride = 1;
  for (size_t i = sizes.size(); i-- > 0;) {
    view.strides[i] = stride;
    stride *= sizes[i];
  }
  view.sizes = std::move(sizes);
  return view;
}

}  // namespace fusewire
