// The Backend over one host's shared memory: agrees on the geometry, picks an algorithm by a size table, and turns
// whatever goes wrong on one rank into an error on all.
#include <algorithm>
#include <array>
#include <cmath>
#include <exception>

#include "collective/shm.h"
#include "collective/shm_context.h"
#include "common/error.h"

namespace fusewire {
namespace {

constexpr size_t kMinChunk = 1024;
constexpr size_t kMinSlice = 32 << 10;

// Buckets of up to `bytes` (in their wire type) go through chunks of `chunk` bytes; 0 means all at once.
struct Row {
  size_t bytes;
  size_t chunk;
};
using Table = std::array<Row, 3>;

// A chunk's slots and the user memory they come from should stay in a core's L2 cache, and a bucket should have a few
// chunks to overlap.
constexpr Table kSpinning = {{{1 << 10, 0}, {128 << 10, 64 << 10}, {SIZE_MAX, 128 << 10}}};

// Where ranks outnumber cores every hand-over is a context switch: fewer, larger chunks.
constexpr Table kCrowded = {{{16 << 10, 0}, {256 << 10, 256 << 10}, {SIZE_MAX, 256 << 10}}};

struct Plan {
  DataType wire;
  double pack_factor;
  ShmReduction reduction;
};

// Where scales are applied. Compression narrows at packing, so the prescale goes there, to keep what it protects from
// overflow in range; otherwise all scaling happens in the accumulator, once. Factors may cross the operator only if
// they commute with it: a negative one turns Min into Max, and n factors cross a Product.
Plan make_plan(const Bucket& bucket, int size) {
  Plan plan{bucket.wire, 1.0, {bucket.op, {bucket.postscale, 1}}};
  if (bucket.op == ReduceOp::kAverage) plan.reduction = {ReduceOp::kSum, {bucket.postscale, size}};
  if (bucket.wire != bucket.dtype) {
    plan.pack_factor = bucket.prescale;
    return plan;
  }
  double crossing = bucket.prescale;
  if (bucket.op == ReduceOp::kProduct) crossing = std::pow(bucket.prescale, size);
  if (bucket.prescale < 0 && bucket.op == ReduceOp::kMin) plan.reduction.op = ReduceOp::kMax;
  if (bucket.prescale < 0 && bucket.op == ReduceOp::kMax) plan.reduction.op = ReduceOp::kMin;
  plan.reduction.scale.factor = crossing * bucket.postscale;
  return plan;
}

class ShmBackend final : public Backend {
 public:
  ShmBackend(std::byte* region, const ShmOptions& options)
      : options_(options),
        context_{ShmRegion(region, options.size),
                 options.rank,
                 ShmWaiter(ShmRegion(region, options.size), options.rank, options.spin, options.abort_after),
                 options.spin.count() == 0,
                 0,
                 {},
                 {},
                 std::vector<const std::byte*>(static_cast<size_t>(options.size)),
                 std::vector<const void*>(static_cast<size_t>(options.size))} {
    // A second backend over the same region goes on where the first one ended.
    const auto& reached = context_.region.progress(options.rank).reached;
    context_.chunk = reached[static_cast<int>(ShmStage::kReduced)].load(std::memory_order_relaxed);
  }

  std::string_view name() const override { return "shm"; }

  void run(const Bucket& bucket) override {
    context_.waiter.throw_if_stopped();
    try {
      if (!agreed_) agree();
      dispatch(bucket);
    } catch (const Error& error) {
      // The others wait for what this rank will never publish.
      context_.waiter.stop(is_fatal(error.code()) ? error.code() : ErrorCode::kCollective, options_.rank);
      throw;
    } catch (const std::exception& error) {
      context_.waiter.stop(ErrorCode::kCollective, options_.rank);
      throw Error(ErrorCode::kCollective, std::string("shared memory: ") + error.what(), options_.rank);
    }
  }

  void abort() noexcept override { context_.waiter.stop(ErrorCode::kPeerLost, -1); }

  std::vector<int> laggards() const override { return context_.waiter.laggards(); }

 private:
  // Note [Agreed geometry]
  // Ranks must cut a bucket alike, but spin and chunk size are each process's own settings. So in its first run() every
  // rank writes its own down, and all follow rank 0's.
  void agree() {
    ShmProgress& own = context_.region.progress(options_.rank);
    own.chunk_bytes.store(static_cast<uint32_t>(std::clamp<int64_t>(options_.chunk_bytes, 0, kShmMaxChunk)));
    own.crowded.store(options_.spin.count() == 0 ? 1 : 0);
    context_.waiter.publish(ShmStage::kJoined, 1);
    context_.waiter.wait_for(0, ShmStage::kJoined, 1);
    const ShmProgress& root = context_.region.progress(0);
    chunk_bytes_ = root.chunk_bytes.load();
    table_ = root.crowded.load() != 0 ? &kCrowded : &kSpinning;
    agreed_ = true;
  }

  void dispatch(const Bucket& bucket) {
    switch (bucket.kind) {
      case OpKind::kAllreduce:
        return allreduce(bucket);
      case OpKind::kBroadcast:
        return broadcast(bucket);
      case OpKind::kAllgather:
      case OpKind::kAlltoall:
      case OpKind::kReduceScatter:
        throw Error(ErrorCode::kCollective, std::string(to_string(bucket.kind)) + " is not built yet");
      case OpKind::kBarrier:
      case OpKind::kJoin:
      case OpKind::kAddProcessSet:
      case OpKind::kRemoveProcessSet:
      case OpKind::kAdoptProcessSet:
        return;  // negotiation was all there is to them
    }
  }

  // 0: all at once. With more ranks a chunk grows, so that what a rank owns of it stays worth a hand-over. A chunk size
  // that the user asks for is kept, also by what goes at once.
  size_t chunk_for(size_t bytes) const {
    const auto row = std::find_if(table_->begin(), table_->end(), [&](const Row& r) { return bytes <= r.bytes; });
    if (chunk_bytes_ != 0) return row->chunk == 0 && bytes <= chunk_bytes_ ? 0 : std::max(chunk_bytes_, kMinChunk);
    if (row->chunk == 0) return 0;
    return std::min(std::max(row->chunk, kMinSlice * static_cast<size_t>(options_.size)), kShmMaxChunk);
  }

  void allreduce(const Bucket& bucket) {
    const Plan plan = make_plan(bucket, options_.size);
    context_.cursor.assign(bucket, plan.wire, plan.pack_factor, plan.reduction.op);
    if (bucket.elements == 0) return;
    const size_t bytes = static_cast<size_t>(bucket.elements) * context_.cursor.wire_bytes();
    const size_t chunk = chunk_for(bytes);
    if (chunk == 0) {
      shm_allreduce_once(context_, plan.reduction);
    } else {
      shm_allreduce_sliced(context_, plan.reduction, chunk);
    }
  }

  void broadcast(const Bucket& bucket) {
    context_.cursor.assign(bucket, bucket.dtype, 1.0, ReduceOp::kSum);
    context_.cursor.set_reads_inputs(options_.rank == bucket.root);
    const size_t bytes = static_cast<size_t>(bucket.elements) * context_.cursor.wire_bytes();
    const size_t chunk = chunk_for(bytes);
    shm_broadcast(context_, bucket.root, chunk == 0 ? kShmMaxChunk : chunk);
  }

  ShmOptions options_;
  ShmContext context_;
  bool agreed_ = false;
  size_t chunk_bytes_ = 0;
  const Table* table_ = &kSpinning;
};

}  // namespace

void shm_stop(std::byte* region, int size) noexcept {
  ShmWaiter(ShmRegion(region, size), 0, std::chrono::nanoseconds(0), std::chrono::nanoseconds(0))
      .stop(ErrorCode::kPeerLost, -1);
}

std::unique_ptr<Backend> make_shm_backend(std::byte* region, const ShmOptions& options) {
  return std::make_unique<ShmBackend>(region, options);
}

}  // namespace fusewire
