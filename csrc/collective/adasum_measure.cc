#include "collective/adasum_measure.h"

#include <algorithm>
#include <cstring>

#include "collective/adasum.h"

namespace fusewire {
namespace {

constexpr int64_t kBlockElements = 4096;

constexpr double kSmallestSquare = 0x1p-600;
constexpr double kLargestSquare = 0x1p600;
constexpr int kLargestExponent = 1000;

double peak(const void* source, size_t count) {  // of fp64
  double largest = 0;
  for (size_t i = 0; i < count; ++i) {
    double x;
    std::memcpy(&x, static_cast<const std::byte*>(source) + i * sizeof(x), sizeof(x));
    largest = std::max(largest, std::abs(x));
  }
  return largest;
}

}  // namespace

std::vector<AdasumBlock> adasum_blocks(const BucketCursor& cursor) {
  std::vector<AdasumBlock> blocks;
  for (size_t entry = 0; entry < cursor.entries(); ++entry) {
    const auto [begin, end] = cursor.entry(entry);
    for (int64_t at = begin; at < end; at += kBlockElements) {
      blocks.push_back({at, std::min(at + kBlockElements, end), entry});
    }
  }
  return blocks;
}

AdasumMeasure::AdasumMeasure(What what, const BucketCursor& cursor, int sources, const std::vector<double>& scales)
    : what_(what), cursor_(cursor), scales_(scales), n_(static_cast<size_t>(sources)) {
  reset();
}

void AdasumMeasure::reset() {
  totals_.assign(cursor_.entries() * values(), 0.0);
  lost_.assign(totals_.size(), 0.0);
}

void AdasumMeasure::compute(const AdasumBlock& block, const void* const* sources, double* results) const {
  const auto count = static_cast<size_t>(block.end - block.begin);
  if (what_ == What::kDots) {
    cpu_kernels().dots({.sources = sources,
                        .scales = scales_.data() + block.entry * n_,
                        .source_count = static_cast<int>(n_),
                        .count = count,
                        .dtype = cursor_.wire(),
                        .dots = results});
    return;
  }
  for (size_t rank = 0; rank < n_; ++rank) results[rank] = peak(sources[rank], count);
}

void AdasumMeasure::add(const AdasumBlock& block, const double* results) {
  for (size_t i = 0; i < values(); ++i) {
    double& total = totals_[block.entry * values() + i];
    double& lost = lost_[block.entry * values() + i];
    if (what_ == What::kPeaks) {
      total = std::max(total, results[i]);
      continue;
    }
    const double sum = total + results[i];
    lost += std::abs(total) >= std::abs(results[i]) ? (total - sum) + results[i] : (results[i] - sum) + total;
    total = sum;
  }
}

std::vector<double> AdasumMeasure::of(size_t entry) const {
  std::vector<double> all(values());
  for (size_t i = 0; i < all.size(); ++i) {
    all[i] = totals_[entry * all.size() + i];
    if (std::isfinite(all[i])) all[i] += lost_[entry * all.size() + i];
  }
  return all;
}

AdasumCombiner::AdasumCombiner(const BucketCursor& cursor, int sources, double factor,
                               const std::function<void(AdasumMeasure&)>& pass)
    : n_(static_cast<size_t>(sources)), entries_(cursor.entries()) {
  found_.scales.assign(entries_ * n_, 1.0);
  exponents_.assign(entries_ * n_, 0);
  AdasumMeasure dots(AdasumMeasure::What::kDots, cursor, sources, found_.scales);
  pass(dots);
  if (cursor.wire() == DataType::kFloat64 && leaves_range(dots)) {
    AdasumMeasure peaks(AdasumMeasure::What::kPeaks, cursor, sources, found_.scales);
    pass(peaks);
    rescale(dots, peaks);
    dots.reset();
    pass(dots);
  }
  combine(dots, factor);
}

bool AdasumCombiner::leaves_range(const std::vector<double>& dots) const {
  size_t square = 0;  // of rank 0, 1, ...
  for (size_t rank = 0; rank < n_; square += n_ - rank, ++rank) {
    if (!(dots[square] >= kSmallestSquare && dots[square] <= kLargestSquare)) return true;
  }
  return false;
}

bool AdasumCombiner::leaves_range(const AdasumMeasure& dots) const {
  for (size_t entry = 0; entry < entries_; ++entry) {
    if (leaves_range(dots.of(entry))) return true;
  }
  return false;
}

void AdasumCombiner::rescale(const AdasumMeasure& dots, const AdasumMeasure& peaks) {
  for (size_t entry = 0; entry < entries_; ++entry) {
    if (!leaves_range(dots.of(entry))) continue;
    int* const exponents = exponents_.data() + entry * n_;
    const std::vector<double> largest = peaks.of(entry);
    int smallest = kLargestExponent;
    for (size_t rank = 0; rank < n_; ++rank) {
      exponents[rank] = kLargestExponent;
      if (std::isfinite(largest[rank])) std::frexp(largest[rank], &exponents[rank]);
      exponents[rank] = std::clamp(exponents[rank], -kLargestExponent, kLargestExponent);
      if (largest[rank] > 0) smallest = std::min(smallest, exponents[rank]);
    }
    for (size_t rank = 0; rank < n_; ++rank) {
      if (largest[rank] == 0) exponents[rank] = smallest;
      found_.scales[entry * n_ + rank] = std::ldexp(1.0, -exponents[rank]);
    }
  }
}

void AdasumCombiner::combine(const AdasumMeasure& dots, double factor) {
  found_.coefficients.reserve(entries_ * n_);
  for (size_t entry = 0; entry < entries_; ++entry) {
    const std::vector<int> exponents(exponents_.begin() + static_cast<ptrdiff_t>(entry * n_),
                                     exponents_.begin() + static_cast<ptrdiff_t>((entry + 1) * n_));
    const AdasumCombination combination = adasum_combination(dots.of(entry), exponents);
    for (const double coefficient : combination.coefficients) found_.coefficients.push_back(coefficient * factor);
    found_.factors.push_back(std::ldexp(1.0, combination.exponent));
  }
}

}  // namespace fusewire
