// Adasum's rule in long double, along the tree of Note [Adasum tree] (collective/adasum.h), on the vectors themselves;
// and buckets that are to follow it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "kernels_data.h"
#include "shm_case.h"

namespace fusewire::testing {

using Wide = std::vector<long double>;

inline Wide adasum_of_two(const Wide& a, const Wide& b) {
  long double aa = 0;
  long double bb = 0;
  long double ab = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    aa += a[i] * a[i];
    bb += b[i] * b[i];
    ab += a[i] * b[i];
  }
  const bool plain = aa == 0 || bb == 0;
  Wide sum(a.size());
  for (size_t i = 0; i < a.size(); ++i) {
    sum[i] = plain ? a[i] + b[i] : (1 - ab / (2 * aa)) * a[i] + (1 - ab / (2 * bb)) * b[i];
  }
  return sum;
}

inline Wide adasum_rule(std::vector<Wide> vectors) {
  size_t whole = 1;
  while (whole * 2 <= vectors.size()) whole *= 2;
  for (size_t r = whole; r < vectors.size(); ++r) vectors[r - whole] = adasum_of_two(vectors[r - whole], vectors[r]);
  for (size_t d = 1; d < whole; d *= 2) {
    for (size_t i = 0; i < whole; i += 2 * d) vectors[i] = adasum_of_two(vectors[i], vectors[i + d]);
  }
  return vectors[0];
}

// What every rank brings to every tensor of a bucket, and how.
struct Job {
  DataType dtype = DataType::kFloat32;
  DataType wire = DataType::kFloat32;
  double prescale = 1.0;
  double postscale = 1.0;
  std::vector<std::vector<Wide>> inputs;  // [tensor][rank]; empty: absent
  std::vector<size_t> counts;             // [tensor]
  bool mixed = false;                     // layouts and in place or not
  int64_t chunk_bytes = 1024;
  int spin = 0;

  int size() const { return static_cast<int>(inputs.front().size()); }
};

inline void write(DataType dtype, std::vector<std::byte>& row, const Wide& values) {
  for (size_t i = 0; i < values.size(); ++i) {
    write_floating(dtype, row.data(), i, static_cast<double>(values[i]));
  }
}

using Rows = std::vector<std::vector<std::byte>>;  // [tensor]

// The job on one rank: the results, and what went wrong.
inline std::string run_on_rank(const Job& job, int rank, Backend& backend, Rows& results) {
  Case dice;
  dice.mixed = job.mixed;
  Bucket bucket;
  bucket.op = ReduceOp::kAdasum;
  bucket.dtype = job.dtype;
  bucket.wire = job.wire;
  bucket.prescale = job.prescale;
  bucket.postscale = job.postscale;
  std::vector<OwnedTensor> inputs;
  std::vector<OwnedTensor> outputs;
  Rows before;
  for (size_t t = 0; t < job.inputs.size(); ++t) {
    const auto count = static_cast<int64_t>(job.counts[t]);
    const Dims sizes = count % 2 == 0 ? Dims{2, count / 2} : Dims{count};
    inputs.emplace_back(job.dtype, sizes, dice.layout(rank, t, 0));
    outputs.emplace_back(job.dtype, sizes, dice.layout(rank, t, 1));
    before.emplace_back(job.counts[t] * size_of(job.dtype));
    const Wide& values = job.inputs[t][static_cast<size_t>(rank)];
    write(job.dtype, before.back(), values);
    inputs.back().write(before.back().data());
  }
  for (size_t t = 0; t < job.inputs.size(); ++t) {
    const bool in_place = job.mixed && dice.in_place(rank, t);
    Segment segment{inputs[t].view(), in_place ? inputs[t].view() : outputs[t].view()};
    if (job.inputs[t][static_cast<size_t>(rank)].empty()) segment.input.data = nullptr;
    bucket.elements += segment.input.numel();
    bucket.segments.push_back(segment);
  }
  backend.run(bucket);
  for (size_t t = 0; t < job.inputs.size(); ++t) {
    const bool in_place = job.mixed && dice.in_place(rank, t);
    results.push_back((in_place ? inputs : outputs)[t].read());
    if (!in_place && inputs[t].read() != before[t]) return "input changed";
    if (!inputs[t].rest_untouched() || !outputs[t].rest_untouched()) return "wrote between elements";
  }
  return "";
}

inline long double unit(DataType dtype) {
  switch (dtype) {
    case DataType::kFloat16:
      return 0x1p-11L;
    case DataType::kBFloat16:
      return 0x1p-8L;
    case DataType::kFloat32:
      return 0x1p-24L;
    default:
      return 0x1p-50L;
  }
}

// Within one rounding of the rule, plus what sums lose: `lost`, in units of what is summed.
inline void expect_rule(const Job& job, const Rows& results, long double lost = 1e-12L) {
  for (size_t t = 0; t < job.inputs.size(); ++t) {
    std::vector<Wide> vectors;
    Wide size(job.counts[t], 0.0L);
    for (const Wide& input : job.inputs[t]) {
      std::vector<std::byte> row(job.counts[t] * size_of(job.dtype));
      write(job.dtype, row, input);
      Wide vector(job.counts[t], 0.0L);
      for (size_t i = 0; i < job.counts[t]; ++i) {
        vector[i] = input.empty() ? 0.0L : read_floating(job.dtype, row.data(), i);
        if (job.wire != job.dtype) {
          std::byte narrow[8];
          write_floating(job.wire, narrow, 0, static_cast<double>(vector[i]) * job.prescale);
          vector[i] = read_floating(job.wire, narrow, 0) / static_cast<long double>(job.prescale);
        }
        size[i] += std::abs(vector[i]);
      }
      vectors.push_back(vector);
    }
    const Wide rule = adasum_rule(vectors);
    const long double scale = static_cast<long double>(job.prescale) * job.postscale;
    for (size_t i = 0; i < job.counts[t]; ++i) {
      const long double expected = rule[i] * scale;
      const long double result = read_floating(job.dtype, results[t].data(), i);
      const long double error = 1.01L * unit(job.wire) * std::abs(expected) +
                                lost * std::abs(scale) * (size[i] + std::abs(rule[i])) +
                                static_cast<long double>(smallest_normal(job.wire)) * unit(job.wire) * 2;
      ASSERT_LE(std::abs(result - expected), error)
          << to_string(job.dtype) << " ranks " << job.size() << " tensor " << t << " element " << i << " of "
          << job.counts[t] << ": expected " << expected << " got " << result;
    }
  }
}

inline Wide random_vector(size_t count, uint64_t seed, double size = 1.0) {
  Wide values(count);
  for (size_t i = 0; i < count; ++i) {
    values[i] = size * (static_cast<double>(mix(seed * 7919 + i) % 20001) - 9000) / 10000;
  }
  return values;
}

inline Job random_job(int ranks, DataType dtype, std::vector<size_t> counts, double size = 1.0) {
  Job job;
  job.dtype = job.wire = dtype;
  job.counts = std::move(counts);
  for (size_t t = 0; t < job.counts.size(); ++t) {
    job.inputs.emplace_back();
    for (int rank = 0; rank < ranks; ++rank) {
      job.inputs.back().push_back(random_vector(job.counts[t], t * 100 + static_cast<uint64_t>(rank), size));
    }
  }
  return job;
}

inline Job given(DataType dtype, std::vector<Wide> inputs) {
  Job job;
  job.dtype = job.wire = dtype;
  job.counts = {0};
  for (const Wide& input : inputs) job.counts[0] = std::max(job.counts[0], input.size());
  job.inputs = {std::move(inputs)};
  return job;
}

}  // namespace fusewire::testing
