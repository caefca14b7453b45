#include "collective/staged/staged_backend.h"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "collective/part_counts.h"
#include "collective/staged/staged_plan.h"
#include "common/chunk_trace.h"
#include "common/error.h"

namespace fusewire {
namespace {

// A stream of one's own.
class GpuStream {
 public:
  explicit GpuStream(std::shared_ptr<GpuDevice> device)
      : device_(std::move(device)), stream_(device_->api().create_stream()) {}
  ~GpuStream() {
    try {  // at the end of a process the driver may be gone already
      device_->api().destroy_stream(stream_);
    } catch (const Error&) {
    }
  }
  GpuStream(const GpuStream&) = delete;
  GpuStream& operator=(const GpuStream&) = delete;

  CudaApi::Stream get() const { return stream_; }

 private:
  const std::shared_ptr<GpuDevice> device_;
  const CudaApi::Stream stream_;
};

// Tells of a chunk in terms of the bucket.
class ShiftedTrace final : public ChunkTrace {
 public:
  ShiftedTrace(ChunkTrace* trace, const StagedChunk& chunk, int64_t elements)
      : trace_(trace), first_(chunk.first), elements_(elements) {}

  void chunk(ChunkStep step, Clock::time_point begin, Clock::time_point end, int64_t from, int64_t to) override {
    trace_->chunk(step, begin, end, std::min(first_ + from, elements_), std::min(first_ + to, elements_));
  }

 private:
  ChunkTrace* trace_;
  int64_t first_;
  int64_t elements_;
};

// Where copies to the host and from it go: the device's own stream, if there is nothing that they could overlap.
struct CopyStreams {
  CudaApi::Stream down;
  CudaApi::Stream up;
};

// Note [Staged pipeline]
// In step i a rank starts chunk i on its way (one launch that packs it, one copy to pinned memory) and finishes chunk
// i-2: waits for its copy, runs the collective, and puts a copy back and one launch that unpacks it behind that. So
// while the host is in a collective, the next chunk's copy has been under way for a whole step, and results of the last
// one go up. Kernels run on the device's stream; copies down and copies up have a stream each, because GPUs move data
// in both directions at once.
//
// Four slots are in use in turn. What orders the uses of a slot:
//   pack i      after unpack i-4, on the same stream, which has waited for copy up i-4
//   copy down i after pack i, by an event; hence after copy up i-4 has read the pinned memory
//   the host    after copy down i, or where it gives nothing, after copy up i-4: `at_host`
//   copy up i   after the host; and after unpack i-4, where this rank gave nothing in between: `unpacked`
//   unpack i    after copy up i, by an event
class Pipeline {
 public:
  Pipeline(GpuDevice& device, Backend& cpu, const Bucket& bucket, const StagedPlan& plan, const CopyStreams& streams)
      : device_(device), cpu_(cpu), bucket_(bucket), plan_(plan), streams_(streams) {
    const size_t bytes = plan.most_bytes();
    for (size_t i = 0; i < std::min(kSlots, plan.chunks().size()); ++i) {
      slots_.push_back(
          {GpuLoan(device, GpuMemory::kDevice, bytes), GpuLoan(device, GpuMemory::kPinned, bytes), {}, {}});
    }
  }

  // When it has failed half-way, memory goes back only after the copies that are still in flight.
  ~Pipeline() {
    if (ended_) return;
    try {
      order(streams_.down, device_.stream());
      order(streams_.up, device_.stream());
    } catch (const Error&) {  // CUDA has failed: the loans cannot end either
    }
  }
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  void run() {
    const size_t chunks = plan_.chunks().size();
    for (size_t step = 0; step < chunks + kAhead; ++step) {
      if (step < chunks) start(step);
      if (step >= kAhead) finish(step - kAhead);
    }
    ended_ = true;
  }

 private:
  static constexpr size_t kAhead = 2;
  static constexpr size_t kSlots = 2 * kAhead;

  struct Slot {
    GpuLoan device;
    GpuLoan pinned;
    SharedEvent at_host;   // when the host may touch the pinned memory
    SharedEvent unpacked;  // when the device's is free
  };

  Slot& slot(size_t index) { return slots_[index % slots_.size()]; }
  static std::byte* at(const GpuLoan& loan, size_t offset) { return static_cast<std::byte*>(loan.get()) + offset; }

  void order(CudaApi::Stream before, CudaApi::Stream after) {
    if (before != after) device_.mark(before)->hold_up(after);
  }

  void start(size_t index) {
    const StagedChunk& chunk = plan_.chunks()[index];
    if (chunk.in.empty()) return;
    Slot& slot = this->slot(index);
    gpu_pack(device_, chunk.in, bucket_.dtype, plan_.wire(), slot.device.get(), {.factor = plan_.factor()});
    order(device_.stream(), streams_.down);
    device_.api().copy(slot.pinned.get(), slot.device.get(), chunk.in_bytes, streams_.down);
    slot.at_host = device_.mark(streams_.down);
  }

  void finish(size_t index) {
    const StagedChunk& chunk = plan_.chunks()[index];
    Slot& slot = this->slot(index);
    {
      const auto step = trace(ChunkStep::kPack, chunk);
      if (slot.at_host) slot.at_host->synchronize();
    }
    collective(chunk, slot);
    const auto step = trace(ChunkStep::kUnpack, chunk);
    if (chunk.up) {
      if (slot.unpacked) slot.unpacked->hold_up(streams_.up);
      device_.api().copy(at(slot.device, chunk.out_begin), at(slot.pinned, chunk.out_begin), chunk.out_bytes,
                         streams_.up);
      slot.at_host = device_.mark(streams_.up);
      if (streams_.up != device_.stream()) slot.at_host->hold_up(device_.stream());
    }
    if (chunk.out.empty()) return;
    gpu_unpack(device_, chunk.out, bucket_.dtype, plan_.wire(), slot.device.get(), {});
    if (streams_.up != device_.stream()) slot.unpacked = device_.mark();
  }

  void collective(const StagedChunk& chunk, const Slot& slot) {
    ShiftedTrace trace(bucket_.trace, chunk, bucket_.elements);
    Bucket inner;
    static_cast<Operation&>(inner) = plan_.operation();
    inner.dtype = inner.wire = plan_.wire();
    inner.elements = chunk.elements;
    inner.trace = bucket_.trace == nullptr ? nullptr : &trace;
    const auto view = [&](bool there, size_t offset, int64_t count) {
      return contiguous_view(there ? at(slot.pinned, offset) : nullptr, plan_.wire(), {count});
    };
    for (const StagedSegment& segment : chunk.segments) {
      inner.segments.push_back({view(segment.present, segment.in_offset, segment.in_count),
                                view(segment.wanted, segment.out_offset, segment.out_count), segment.counts});
    }
    cpu_.run(inner);
  }

  ChunkStopwatch::Scope trace(ChunkStep step, const StagedChunk& chunk) {
    watch_.start(bucket_.trace, bucket_.elements);
    return watch_.step(step, std::min(chunk.first, bucket_.elements),
                       std::min(chunk.first + chunk.elements, bucket_.elements));
  }

  GpuDevice& device_;
  Backend& cpu_;
  const Bucket& bucket_;
  const StagedPlan& plan_;
  const CopyStreams streams_;
  std::vector<Slot> slots_;
  ChunkStopwatch watch_;
  bool ended_ = false;
};

// The bucket with inputs that its own outputs would overwrite too early replaced by copies on the device.
class DetachedOnDevice {
 public:
  DetachedOnDevice(GpuDevice& device, const Bucket& bucket, const GpuPlaneOptions& options) : bucket_(bucket) {
    const bool parts = !bucket.segments.empty() && !bucket.segments.front().counts.empty();
    for (size_t i = 0; parts && i < bucket.segments.size(); ++i) {
      const Segment& segment = bucket.segments[i];
      if (!overwrites_input(bucket, segment, options.size, options.rank)) continue;
      if (copies_.empty()) replaced_ = bucket;
      const int64_t count = segment.input.numel();
      copies_.emplace_back(device, GpuMemory::kDevice, static_cast<size_t>(count) * size_of(bucket.dtype));
      void* const copy = copies_.back().get();
      gpu_pack(device, {{&segment.input, 0, count, 0}}, bucket.dtype, bucket.dtype, copy, {});
      replaced_.segments[i].input = contiguous_view(copy, bucket.dtype, segment.input.sizes);
    }
  }
  const Bucket& get() const { return copies_.empty() ? bucket_ : replaced_; }

 private:
  const Bucket& bucket_;
  Bucket replaced_;
  std::vector<GpuLoan> copies_;
};

class StagedBackend final : public Backend {
 public:
  StagedBackend(std::shared_ptr<GpuDevice> device, const GpuPlaneOptions& options, Backend& cpu, size_t chunk_bytes)
      : device_(std::move(device)), options_(options), cpu_(cpu), chunk_bytes_(chunk_bytes) {}

  std::string_view name() const override { return "staged"; }

  void run(const Bucket& bucket) override {
    check();
    try {
      run_bucket(bucket);
    } catch (const Error&) {
      cpu_.abort();  // the others wait for what this rank will never give
      throw;
    } catch (const std::exception& error) {
      cpu_.abort();
      throw Error(ErrorCode::kCollective, std::string("host staging: ") + error.what(), options_.rank);
    }
  }

  // Its failures are the CPU plane's: that one stops all members, and what is left on this device, copies and kernels,
  // ends by itself.
  void check() override { cpu_.check(); }
  void abort() noexcept override { cpu_.abort(); }
  std::vector<int> laggards() const override { return cpu_.laggards(); }

 private:
  void run_bucket(const Bucket& given) {
    if (!moves_data(given.kind)) return;
    const DetachedOnDevice detached(*device_, given, options_);
    const Bucket& bucket = detached.get();
    const StagedPlan plan(bucket, options_.size, options_.rank, chunk_bytes_);
    if (plan.chunks().empty()) return;
    Pipeline(*device_, cpu_, bucket, plan, streams(plan.chunks().size())).run();
  }

  CopyStreams streams(size_t chunks) {
    if (chunks == 1) return {device_->stream(), device_->stream()};
    if (!down_) {
      down_ = std::make_unique<GpuStream>(device_);
      up_ = std::make_unique<GpuStream>(device_);
    }
    return {down_->get(), up_->get()};
  }

  const std::shared_ptr<GpuDevice> device_;
  const GpuPlaneOptions options_;
  Backend& cpu_;
  const size_t chunk_bytes_;
  std::unique_ptr<GpuStream> down_;  // made for the first bucket that needs them
  std::unique_ptr<GpuStream> up_;
};

}  // namespace

std::unique_ptr<Backend> make_staged_backend(std::shared_ptr<GpuDevice> device, const GpuPlaneOptions& options,
                                             Backend& cpu, size_t chunk_bytes) {
  return std::make_unique<StagedBackend>(std::move(device), options, cpu, chunk_bytes);
}

}  // namespace fusewire
