#include "engine/stats.h"

#include <bit>

namespace fusewire {

namespace {

uint64_t sum_of(const EngineStats& stats, uint64_t OperationStats::* field) {
  uint64_t sum = 0;
  for (int kind = 0; kind < kOpKindCount; ++kind) {
    if (moves_data(static_cast<OpKind>(kind))) sum += stats.operations[static_cast<size_t>(kind)].*field;
  }
  return sum;
}

}  // namespace

uint64_t EngineStats::units() const { return sum_of(*this, &OperationStats::units); }
uint64_t EngineStats::buckets() const { return sum_of(*this, &OperationStats::buckets); }
uint64_t EngineStats::bytes() const { return sum_of(*this, &OperationStats::bytes); }

// ---------------------------------------------------------------------------------------------------------------------

// Bin 0 holds zeros. A value with its highest bit at b is in one of the 2^sub_bits equal parts of [2^b, 2^(b+1)).
size_t LogHistogram::index(uint64_t value) const {
  if (value == 0) return 0;
  const int bit = std::bit_width(value) - 1;
  const uint64_t rest = value - (uint64_t{1} << bit);
  const uint64_t part = bit >= sub_bits_ ? rest >> (bit - sub_bits_) : rest << (sub_bits_ - bit);
  return (static_cast<size_t>(bit + 1) << sub_bits_) + static_cast<size_t>(part);
}

uint64_t LogHistogram::most(size_t index) const {
  const size_t block = index >> sub_bits_;
  if (block == 0) return 0;
  const int bit = static_cast<int>(block) - 1;
  const uint64_t part = (index & ((size_t{1} << sub_bits_) - 1)) + 1;
  const uint64_t first = uint64_t{1} << bit;
  return first - 1 +
         (bit >= sub_bits_ ? part << (bit - sub_bits_) : ((part << bit) + (1 << sub_bits_) - 1) >> sub_bits_);
}

HistogramSnapshot LogHistogram::snapshot() const {
  HistogramSnapshot result;
  for (size_t i = 0; i < counts_.size(); ++i) {
    if (const uint64_t count = counts_[i].get()) result.bins.push_back({most(i), count});
  }
  return result;
}

// ---------------------------------------------------------------------------------------------------------------------

void StatsCounters::ended(OpKind kind, bool skipped) {
  if (skipped) {
    skipped_.fetch_add(1, std::memory_order_relaxed);
  } else {
    kinds_[static_cast<size_t>(kind)].other.add(1);
  }
}

void StatsCounters::ran(OpKind kind, size_t units, int64_t bytes, uint64_t duration_ticks, bool by_executor) {
  PerKind& counters = kinds_[static_cast<size_t>(kind)];
  counters.run.add(units);
  counters.buckets.add(1);
  counters.bytes.add(static_cast<uint64_t>(bytes));
  (by_executor ? executor_ : inline_).add(1);
  plane_ticks_.add(duration_ticks);
  bucket_units_.add(units);
  bucket_bytes_.add(static_cast<uint64_t>(bytes));
}

EngineStats StatsCounters::snapshot() const {
  EngineStats stats;
  for (size_t kind = 0; kind < kinds_.size(); ++kind) {
    const PerKind& counters = kinds_[kind];
    stats.operations[kind] = {counters.run.get() + counters.other.get(), counters.buckets.get(), counters.bytes.get()};
  }
  stats.failed = failed_.load(std::memory_order_relaxed);
  stats.skipped = skipped_.load(std::memory_order_relaxed);
  stats.inline_buckets = inline_.get();
  stats.executor_buckets = executor_.get();
  stats.gpu_buckets = gpu_.get();
  stats.plane_seconds = rate_.seconds(plane_ticks_.get());
  stats.negotiation = negotiation_.snapshot();
  stats.bucket_units = bucket_units_.snapshot();
  stats.bucket_bytes = bucket_bytes_.snapshot();
  return stats;
}

}  // namespace fusewire
