// One collective with everything that may vary, its inputs, and what a naive implementation gives: gather each rank's
// logical row, combine the rows with the reference kernels, convert back.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <sstream>
#include <string>
#include <vector>

#include "collective/backend.h"
#include "kernels/kernels.h"

namespace fusewire::testing {

inline uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// `count` values that depend on nothing but the seed: any bits for integers, moderate numbers for the rest.
inline std::vector<std::byte> make_values(DataType dtype, int64_t count, uint64_t seed) {
  const size_t n = static_cast<size_t>(count);
  std::vector<std::byte> bytes(n * size_of(dtype));
  if (is_floating(dtype) || is_complex(dtype)) {
    const size_t numbers = is_complex(dtype) ? 2 * n : n;
    std::vector<double> values(numbers);
    for (size_t i = 0; i < numbers; ++i) {
      values[i] = static_cast<double>(static_cast<int64_t>(mix(seed + i) % 20001) - 10000) / 777.0;
    }
    DataType part = dtype;
    if (dtype == DataType::kComplex64) part = DataType::kFloat32;
    if (dtype == DataType::kComplex128) part = DataType::kFloat64;
    available_cpu_kernels().front()->cast(DataType::kFloat64, values.data(), part, bytes.data(), numbers, 1.0);
  } else {
    for (size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<std::byte>(dtype == DataType::kBool ? mix(seed + i) & 1 : mix(seed + i) & 0xff);
    }
  }
  return bytes;
}

enum class Layout { kDense, kReversed, kGaps };  // row-major; column-major; row-major with unused elements between

// A tensor with memory of its own, of which unused bytes are watched.
class OwnedTensor {
 public:
  OwnedTensor(DataType dtype, const Dims& sizes, Layout layout) : dense_(layout == Layout::kDense) {
    view_ = contiguous_view(nullptr, dtype, sizes);
    int64_t stride = layout == Layout::kGaps ? 3 : 1;
    for (size_t i = 0; i < sizes.size(); ++i) {
      const size_t dim = layout == Layout::kReversed ? i : sizes.size() - 1 - i;
      view_.strides[dim] = stride;
      stride *= std::max<int64_t>(1, sizes[dim]) + (layout == Layout::kGaps ? 1 : 0);
    }
    memory_.assign(static_cast<size_t>(stride + 1) * size_of(dtype) + 64, std::byte{kUnused});
    view_.data = memory_.data() + 32 / size_of(dtype) * size_of(dtype);
  }

  const TensorView& view() const { return view_; }

  void write(const std::byte* row) {
    runs([&](std::byte* memory, int64_t i, size_t bytes) {
      std::memcpy(memory, row + static_cast<size_t>(i) * width(), bytes);
    });
  }

  std::vector<std::byte> read() {
    std::vector<std::byte> row(static_cast<size_t>(view_.numel()) * width());
    runs([&](std::byte* memory, int64_t i, size_t bytes) {
      std::memcpy(row.data() + static_cast<size_t>(i) * width(), memory, bytes);
    });
    return row;
  }

  // Wipes the elements.
  bool rest_untouched() {
    runs([&](std::byte* memory, int64_t, size_t bytes) { std::memset(memory, kUnused, bytes); });
    return std::count(memory_.begin(), memory_.end(), std::byte{kUnused}) == std::ssize(memory_);
  }

 private:
  size_t width() const { return size_of(view_.dtype); }

  // visit(memory, logical index, bytes) for stretches that are contiguous on both sides: everything, or one element.
  template <typename Visit>
  void runs(Visit&& visit) {
    const int64_t count = view_.numel();
    if (count == 0) return;
    if (dense_) return visit(static_cast<std::byte*>(view_.data), 0, static_cast<size_t>(count) * width());
    Dims index(view_.sizes.size(), 0);
    for (int64_t i = 0; i < count; ++i) {
      int64_t offset = 0;
      for (size_t d = 0; d < index.size(); ++d) offset += index[d] * view_.strides[d];
      visit(static_cast<std::byte*>(view_.data) + offset * static_cast<int64_t>(width()), i, width());
      for (size_t d = index.size(); d-- > 0;) {
        if (++index[d] < view_.sizes[d]) break;
        index[d] = 0;
      }
    }
  }

  static constexpr unsigned char kUnused = 0xa5;
  bool dense_;
  TensorView view_;
  std::vector<std::byte> memory_;
};

struct Case {
  int size = 2;
  OpKind kind = OpKind::kAllreduce;
  DataType dtype = DataType::kFloat32;
  DataType wire = DataType::kFloat32;
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1.0;
  double postscale = 1.0;
  int root = 0;
  std::vector<Dims> shapes;
  uint64_t seed = 1;
  bool out_of_place = false;
  bool nearly = false;  // sums of floats are made in another order and type than the reference's
  bool mixed = false;   // layouts, aliasing, absences and unwanted outputs vary by rank and tensor

  uint64_t dice(int rank, size_t tensor, uint64_t what) const {
    return mixed ? mix(seed * 1000003 + tensor * 1009 + static_cast<uint64_t>(rank) * 31 + what * 7) : 0;
  }
  bool absent(int rank, size_t tensor) const {
    if (kind == OpKind::kBroadcast) return mixed && rank != root && dice(rank, tensor, 1) % 2 == 0;
    return mixed && dice(rank, tensor, 1) % 4 == 1;
  }
  bool unwanted(int rank, size_t tensor) const { return mixed && dice(rank, tensor, 2) % 8 == 1; }
  bool in_place(int rank, size_t tensor) const { return mixed ? dice(rank, tensor, 3) % 2 == 0 : !out_of_place; }
  Layout layout(int rank, size_t tensor, uint64_t which) const {
    const uint64_t d = dice(rank, tensor, 4 + which) % 5;
    return d < 3 ? Layout::kDense : d == 3 ? Layout::kReversed : Layout::kGaps;
  }
  std::vector<std::byte> values(int rank, size_t tensor) const {
    return make_values(dtype, numel(shapes[tensor]), seed * 77 + tensor * 1000 + static_cast<uint64_t>(rank) * 5000011);
  }

  std::string describe() const {
    std::ostringstream text;
    text << to_string(kind) << ' ' << to_string(op) << ' ' << to_string(dtype) << '/' << to_string(wire)
         << " n=" << size << " pre=" << prescale << " post=" << postscale << (mixed ? " mixed" : "")
         << " seed=" << seed;
    for (size_t i = 0; i < shapes.size() && i < 6; ++i) text << ' ' << to_string(shapes[i]);
    return text.str();
  }
};

// The expected result of one tensor, in logical order.
inline std::vector<std::byte> expect(const Case& c, size_t tensor) {
  if (c.kind == OpKind::kBroadcast) return c.values(c.root, tensor);
  const CpuKernels& plain = *available_cpu_kernels().front();
  const int64_t count = numel(c.shapes[tensor]);
  const size_t n = static_cast<size_t>(count);
  ReduceOp op = c.op;
  if (c.wire == c.dtype && c.prescale < 0 && c.op == ReduceOp::kMin) op = ReduceOp::kMax;
  if (c.wire == c.dtype && c.prescale < 0 && c.op == ReduceOp::kMax) op = ReduceOp::kMin;
  std::vector<std::vector<std::byte>> rows;
  std::vector<const void*> sources;
  for (int rank = 0; rank < c.size; ++rank) {
    std::vector<std::byte> row(n * size_of(c.wire));
    if (c.absent(rank, tensor)) {
      fill_identity(c.wire, op, row.data(), n);
    } else if (c.wire == c.dtype) {
      row = c.values(rank, tensor);
    } else {
      plain.cast(c.dtype, c.values(rank, tensor).data(), c.wire, row.data(), n, c.prescale);
    }
    rows.push_back(std::move(row));
  }
  for (const auto& row : rows) sources.push_back(row.data());
  std::vector<std::byte> result(n * size_of(c.wire));
  double crossing = c.op == ReduceOp::kProduct ? std::pow(c.prescale, c.size) : c.prescale;
  if (c.wire != c.dtype) crossing = 1.0;
  ReduceArgs args;
  args.sources = sources.data();
  args.source_count = c.size;
  args.destination = result.data();
  args.count = n;
  args.dtype = c.wire;
  args.op = op == ReduceOp::kAverage ? ReduceOp::kSum : op;
  args.scale = {crossing * c.postscale, c.op == ReduceOp::kAverage ? c.size : 1};
  plain.reduce(args);
  if (c.wire == c.dtype) return result;
  std::vector<std::byte> wide(n * size_of(c.dtype));
  plain.cast(c.wire, result.data(), c.dtype, wide.data(), n, 1.0);
  return wide;
}

// Whether a result is the expected one: bit for bit, but for what `nearly` says.
inline bool agrees(const Case& c, const std::vector<std::byte>& got, const std::vector<std::byte>& expected) {
  const bool sum = c.op == ReduceOp::kSum || c.op == ReduceOp::kAverage;
  if (!c.nearly || !sum || !(is_floating(c.dtype) || is_complex(c.dtype))) return got == expected;
  const auto real = [](DataType type) {
    if (type == DataType::kComplex64) return DataType::kFloat32;
    return type == DataType::kComplex128 ? DataType::kFloat64 : type;
  };
  const auto wide = [&](const std::vector<std::byte>& row) {
    std::vector<double> values(row.size() / size_of(real(c.dtype)));
    available_cpu_kernels().front()->cast(real(c.dtype), row.data(), DataType::kFloat64, values.data(), values.size(),
                                          1.0);
    return values;
  };
  const DataType type = real(c.wire);
  const double unit = type == DataType::kFloat16    ? 0x1p-11
                      : type == DataType::kBFloat16 ? 0x1p-8
                      : type == DataType::kFloat32  ? 0x1p-24
                                                    : 0x1p-53;
  // make_values() gives numbers below 13.
  const double largest = 13.0 * c.size * std::max(1.0, std::abs(c.prescale)) * std::max(1.0, std::abs(c.postscale));
  const std::vector<double> one = wide(got);
  const std::vector<double> other = wide(expected);
  for (size_t i = 0; i < other.size(); ++i) {
    if (!(std::abs(one[i] - other[i]) <= unit * (c.size + 2) * largest)) return false;
  }
  return one.size() == other.size();
}

// Runs the case on one rank and compares. `expected` holds expect() of each tensor.
inline std::string run_case(const Case& c, const std::vector<std::vector<std::byte>>& expected, int rank,
                            Backend& backend) {
  Bucket bucket;
  bucket.kind = c.kind;
  bucket.op = c.op;
  bucket.dtype = c.dtype;
  bucket.wire = c.wire;
  bucket.prescale = c.prescale;
  bucket.postscale = c.postscale;
  bucket.root = c.root;
  std::vector<OwnedTensor> inputs;
  std::vector<OwnedTensor> outputs;
  std::vector<std::vector<std::byte>> values;
  for (size_t t = 0; t < c.shapes.size(); ++t) {
    inputs.emplace_back(c.dtype, c.shapes[t], c.layout(rank, t, 0));
    outputs.emplace_back(c.dtype, c.shapes[t], c.layout(rank, t, 1));
    values.push_back(c.values(rank, t));
    inputs.back().write(values.back().data());
  }
  for (size_t t = 0; t < c.shapes.size(); ++t) {
    Segment segment{inputs[t].view(), c.in_place(rank, t) ? inputs[t].view() : outputs[t].view()};
    if (c.absent(rank, t)) segment.input.data = nullptr;
    if (c.unwanted(rank, t)) segment.output.data = nullptr;
    bucket.elements += segment.input.numel();
    bucket.segments.push_back(segment);
  }
  backend.run(bucket);
  for (size_t t = 0; t < c.shapes.size(); ++t) {
    const std::string where = c.describe() + ", tensor " + std::to_string(t);
    const bool wanted = !c.unwanted(rank, t);
    const bool in_place = c.in_place(rank, t);
    if (wanted && !agrees(c, (in_place ? inputs[t] : outputs[t]).read(), expected[t])) return "wrong result: " + where;
    if ((!wanted || !in_place) && inputs[t].read() != values[t]) return "input changed: " + where;
    if (!inputs[t].rest_untouched() || !outputs[t].rest_untouched()) return "wrote between elements: " + where;
  }
  return "";
}

// Runs the cases back to back on one rank.
inline std::string run_cases(const std::vector<Case>& cases,
                             const std::vector<std::vector<std::vector<std::byte>>>& expected, int rank,
                             Backend& backend) {
  for (size_t i = 0; i < cases.size(); ++i) {
    std::string fault = run_case(cases[i], expected[i], rank, backend);
    if (!fault.empty()) return fault;
  }
  return "";
}

inline std::vector<std::vector<std::vector<std::byte>>> expect_all(const std::vector<Case>& cases) {
  std::vector<std::vector<std::vector<std::byte>>> all;
  for (const Case& c : cases) {
    all.emplace_back();
    for (size_t t = 0; t < c.shapes.size(); ++t) all.back().push_back(expect(c, t));
  }
  return all;
}

}  // namespace fusewire::testing
