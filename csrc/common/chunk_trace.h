// What a data plane tells about a bucket while it runs, for whoever draws it. Whether anybody listens is a null check.
#pragma once

#include <chrono>
#include <cstdint>
#include <string_view>

namespace fusewire {

// What a data plane does in turn with a part of a bucket. Together, kWait and kReduce are the collective proper.
enum class ChunkStep : uint8_t {
  kPack,    // user memory -> staging
  kWait,    // for other ranks
  kReduce,  // staging of all ranks -> results, and those that are this rank's own home
  kUnpack,  // results -> user memory
};
inline constexpr int kChunkStepCount = 4;

class ChunkTrace {
 public:
  using Clock = std::chrono::steady_clock;

  // Elements [from, to) of the bucket went through `step`. Called on the thread that runs the bucket, in order of time.
  virtual void chunk(ChunkStep step, Clock::time_point begin, Clock::time_point end, int64_t from, int64_t to) = 0;

 protected:
  ~ChunkTrace() = default;
};

// Times the steps of an algorithm. A step begins where the last one ended, so it costs one look at the clock, and
// nothing but a branch where nobody listens; a wait inside of a step cuts it in two.
class ChunkStopwatch {
 public:
  // For one bucket of so many elements; `trace` may be null.
  void start(ChunkTrace* trace, int64_t elements) {
    trace_ = trace;
    if (trace_ == nullptr) [[likely]]
      return;
    elements_ = elements;
    last_ = ChunkTrace::Clock::now();
  }

  // The step lasts as long as the object that is returned.
  class Scope {
   public:
    explicit Scope(ChunkStopwatch* watch) : watch_(watch) {}
    ~Scope() {
      if (watch_ != nullptr) [[unlikely]]
        watch_->lap(watch_->step_);
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    ChunkStopwatch* watch_;
  };
  [[nodiscard]] Scope step(ChunkStep step, int64_t from, int64_t to) {
    if (trace_ == nullptr) [[likely]]
      return Scope(nullptr);
    step_ = step;
    from_ = from;
    to_ = to;
    return Scope(this);
  }
  // Of the whole bucket, where an algorithm does not go through it in order.
  [[nodiscard]] Scope step(ChunkStep kind) { return step(kind, 0, elements_); }

  // Around a wait that does not end at once.
  void wait_begins() {
    if (trace_ != nullptr) [[unlikely]]
      lap(step_);
  }
  void wait_ends() {
    if (trace_ != nullptr) [[unlikely]]
      lap(ChunkStep::kWait);
  }

 private:
  void lap(ChunkStep step) {
    const auto now = ChunkTrace::Clock::now();
    if (from_ < to_) trace_->chunk(step, last_, now, from_, to_);
    last_ = now;
  }

  ChunkTrace* trace_ = nullptr;
  int64_t elements_ = 0;
  ChunkTrace::Clock::time_point last_{};
  ChunkStep step_ = ChunkStep::kPack;
  int64_t from_ = 0;
  int64_t to_ = 0;
};

}  // namespace fusewire
