// What an engine counts always: single-writer counters in relaxed atomics, a few nanoseconds per unit.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/ticks.h"
#include "common/types.h"
#include "control/participant.h"

namespace fusewire {

// How often values of which size were seen.
struct HistogramSnapshot {
  struct Bin {
    uint64_t most = 0;  // values up to this one, and larger than the bin's before
    uint64_t count = 0;
  };

  std::vector<Bin> bins;  // ascending; empty ones are left out
};

struct OperationStats {
  uint64_t units = 0;    // tensors or explicit groups that have come to an end well
  uint64_t buckets = 0;  // data planes' runs; operations that move no data have none
  uint64_t bytes = 0;    // this rank's, in the type that is communicated
};

struct EngineStats {
  std::array<OperationStats, kOpKindCount> operations{};
  uint64_t failed = 0;            // units that raise
  uint64_t skipped = 0;           // units for which no rank had anything
  uint64_t inline_buckets = 0;    // run by a thread that waited, or by the coordinator thread
  uint64_t executor_buckets = 0;  // run by the executor thread
  uint64_t gpu_buckets = 0;       // of those, with CUDA tensors in them
  double plane_seconds = 0;       // inside the data planes, waits for other ranks included
  CacheCounts cache;
  HistogramSnapshot negotiation;  // nanoseconds from submission to answer
  HistogramSnapshot bucket_units;
  HistogramSnapshot bucket_bytes;

  // Sums over the operations that move data.
  uint64_t units() const;
  uint64_t buckets() const;
  uint64_t bytes() const;
};

// Relaxed, without a locked instruction: only one thread writes at a time, and hand-overs between writers order them.
class Counter {
 public:
  void add(uint64_t n) { value_.store(value_.load(std::memory_order_relaxed) + n, std::memory_order_relaxed); }
  uint64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

// Bins per power of two, so that a quantile is right within 12 % (kSubBits = 2), or one bin for each (0).
class LogHistogram {
 public:
  explicit LogHistogram(int sub_bits) : sub_bits_(sub_bits), counts_(static_cast<size_t>(65 << sub_bits)) {}
  void add(uint64_t value) { counts_[index(value)].add(1); }
  HistogramSnapshot snapshot() const;

 private:
  size_t index(uint64_t value) const;
  uint64_t most(size_t index) const;  // the largest value of a bin

  const int sub_bits_;
  std::vector<Counter> counts_;
};

// Writers: the driver (answered, ended) and whoever runs a bucket (ran, ran_on_gpu).
class StatsCounters {
 public:
  void answered(uint64_t nanoseconds) { negotiation_.add(nanoseconds); }
  void ended(OpKind kind, bool skipped);
  void skipped(uint64_t units) { skipped_.fetch_add(units, std::memory_order_relaxed); }  // any thread
  void failed(uint64_t units) { failed_.fetch_add(units, std::memory_order_relaxed); }    // any thread
  void ran(OpKind kind, size_t units, int64_t bytes, uint64_t duration_ticks, bool by_executor);

  void ran_on_gpu() { gpu_.add(1); }

  EngineStats snapshot() const;  // without the cache's

 private:
  struct PerKind {
    Counter run;    // units
    Counter other;  // units that ended without a run
    Counter buckets;
    Counter bytes;
  };
  std::array<PerKind, kOpKindCount> kinds_{};
  std::atomic<uint64_t> failed_{0};
  std::atomic<uint64_t> skipped_{0};
  Counter inline_;
  Counter executor_;
  Counter gpu_;
  Counter plane_ticks_;
  LogHistogram negotiation_{2};
  LogHistogram bucket_units_{0};
  LogHistogram bucket_bytes_{0};
  TickRate rate_;
};

}  // namespace fusewire
