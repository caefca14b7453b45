// Collectives in which ranks hold different parts, and what they give, by concatenation alone. A tensor's rows are
// `width` elements wide; how many go from whom to whom comes from the seed.
#pragma once

#include <algorithm>
#include <numeric>

#include "shm_case.h"

namespace fusewire::testing {

struct PartsCase {
  Case base;  // kind, dtype, op, scales, size, seed, mixed; its shapes are set by make()
  std::vector<int64_t> widths;
  int64_t most_rows = 5;
  std::vector<std::vector<int64_t>> rows;  // of each tensor: n, or n * n for an alltoall
  uint64_t zero_ranks = 0;                 // a bit for each rank that gives nothing

  static PartsCase make(OpKind kind, DataType dtype, int size, std::vector<int64_t> widths, int64_t most_rows,
                        uint64_t seed) {
    PartsCase c;
    c.base.kind = kind;
    c.base.dtype = c.base.wire = dtype;
    c.base.size = size;
    c.base.seed = seed;
    c.widths = std::move(widths);
    c.most_rows = most_rows;
    return c;
  }

  // After everything else is set.
  PartsCase& finish() {
    const auto n = static_cast<uint64_t>(base.size);
    for (size_t t = 0; t < widths.size(); ++t) {
      std::vector<int64_t> counts(base.kind == OpKind::kAlltoall ? n * n : n);
      for (uint64_t i = 0; i < counts.size(); ++i) {
        const uint64_t giver = base.kind == OpKind::kAlltoall ? i / n : i;
        const uint64_t dice = mix(base.seed * 8191 + t * 131 + i);
        counts[i] = static_cast<int64_t>(dice % static_cast<uint64_t>(most_rows + 1));
        if ((zero_ranks >> giver & 1) != 0 && base.kind != OpKind::kReduceScatter) counts[i] = 0;
      }
      rows.push_back(counts);
      base.shapes.push_back({std::accumulate(counts.begin(), counts.end(), int64_t{0}), widths[t]});
    }
    return *this;
  }

  int64_t count(size_t t, int giver, int taker) const {
    const auto n = static_cast<size_t>(base.size);
    const auto g = static_cast<size_t>(giver);
    const auto k = static_cast<size_t>(taker);
    const size_t i = base.kind == OpKind::kAllgather ? g : base.kind == OpKind::kAlltoall ? g * n + k : k;
    return rows[t][i] * widths[t];
  }
  int64_t in_rows(size_t t, int rank) const {
    if (base.kind == OpKind::kAllgather) return rows[t][static_cast<size_t>(rank)];
    int64_t sum = 0;
    for (int taker = 0; taker < base.size; ++taker) sum += count(t, rank, taker);
    return sum / widths[t];
  }
  int64_t out_rows(size_t t, int rank) const {
    if (base.kind == OpKind::kReduceScatter) return rows[t][static_cast<size_t>(rank)];
    int64_t sum = 0;
    for (int giver = 0; giver < base.size; ++giver) sum += count(t, giver, rank);
    return sum / widths[t];
  }
  std::vector<int64_t> counts(size_t t) const {
    std::vector<int64_t> all = rows[t];
    for (int64_t& count : all) count *= widths[t];
    return all;
  }
  std::vector<std::byte> input(size_t t, int rank) const {
    return make_values(base.dtype, in_rows(t, rank) * widths[t],
                       base.seed * 77 + t * 1000 + static_cast<uint64_t>(rank) * 5000011);
  }
};

// What `rank` ends with in tensor t.
inline std::vector<std::byte> expect(const PartsCase& c, size_t t, int rank) {
  const size_t width = size_of(c.base.dtype);
  const auto cut = [&](const std::vector<std::byte>& row, int64_t skipped, int64_t count) {
    const auto begin = row.begin() + skipped * static_cast<int64_t>(width);
    return std::vector<std::byte>(begin, begin + count * static_cast<int64_t>(width));
  };
  if (c.base.kind == OpKind::kReduceScatter) {
    int64_t skipped = 0;
    for (int owner = 0; owner < rank; ++owner) skipped += c.count(t, 0, owner);
    return cut(expect(c.base, t), skipped, c.count(t, 0, rank));
  }
  std::vector<std::byte> result;
  for (int giver = 0; giver < c.base.size; ++giver) {
    int64_t skipped = 0;
    for (int taker = 0; taker < rank && c.base.kind == OpKind::kAlltoall; ++taker) skipped += c.count(t, giver, taker);
    const std::vector<std::byte> part = cut(c.input(t, giver), skipped, c.count(t, giver, rank));
    result.insert(result.end(), part.begin(), part.end());
  }
  return result;
}

using Expected = std::vector<std::vector<std::vector<std::vector<std::byte>>>>;  // [case][rank][tensor]

inline Expected expect_all(const std::vector<PartsCase>& cases) {
  Expected all;
  for (const PartsCase& c : cases) {
    auto& ranks = all.emplace_back(static_cast<size_t>(c.base.size));
    for (int rank = 0; rank < c.base.size; ++rank) {
      for (size_t t = 0; t < c.widths.size(); ++t) ranks[static_cast<size_t>(rank)].push_back(expect(c, t, rank));
    }
  }
  return all;
}

inline std::string run_case(const PartsCase& c, const std::vector<std::vector<std::byte>>& expected, int rank,
                            Backend& backend) {
  const Case& base = c.base;
  Bucket bucket;
  bucket.kind = base.kind;
  bucket.op = base.op;
  bucket.dtype = base.dtype;
  bucket.wire = base.wire;
  bucket.prescale = base.prescale;
  bucket.postscale = base.postscale;
  std::vector<OwnedTensor> inputs;
  std::vector<OwnedTensor> outputs;
  for (size_t t = 0; t < c.widths.size(); ++t) {
    inputs.emplace_back(base.dtype, Dims{c.in_rows(t, rank), c.widths[t]}, base.layout(rank, t, 0));
    outputs.emplace_back(base.dtype, Dims{c.out_rows(t, rank), c.widths[t]}, base.layout(rank, t, 1));
    inputs.back().write(c.input(t, rank).data());
  }
  for (size_t t = 0; t < c.widths.size(); ++t) {
    Segment segment{inputs[t].view(), outputs[t].view(), c.counts(t)};
    const bool absent = base.kind == OpKind::kReduceScatter ? base.absent(rank, t) : c.in_rows(t, rank) == 0;
    if (absent) segment.input.data = nullptr;
    if (base.unwanted(rank, t)) segment.output.data = nullptr;
    bucket.elements += segment.input.numel();
    bucket.segments.push_back(segment);
  }
  backend.run(bucket);
  for (size_t t = 0; t < c.widths.size(); ++t) {
    const std::string where = base.describe() + ", tensor " + std::to_string(t);
    if (!base.unwanted(rank, t) && !agrees(base, outputs[t].read(), expected[t])) return "wrong result: " + where;
    if (inputs[t].read() != c.input(t, rank)) return "input changed: " + where;
    if (!inputs[t].rest_untouched() || !outputs[t].rest_untouched()) return "wrote between elements: " + where;
  }
  return "";
}

inline std::string run_cases(const std::vector<PartsCase>& cases, const Expected& expected, int rank,
                             Backend& backend) {
  for (size_t i = 0; i < cases.size(); ++i) {
    std::string fault = run_case(cases[i], expected[i][static_cast<size_t>(rank)], rank, backend);
    if (!fault.empty()) return fault;
  }
  return "";
}

}  // namespace fusewire::testing
