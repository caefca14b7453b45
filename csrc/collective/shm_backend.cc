// The Backend over one host's shared memory: agrees on the geometry, picks an algorithm by a size table, and turns
// whatever goes wrong on one rank into an error on all.
#include <algorithm>
#include <array>
#include <exception>

#include "collective/shm.h"
#include "collective/shm_context.h"
#include "common/error.h"

namespace fusewire {
namespace {

class ShmBackend final : public Backend {
 public:
  ShmBackend(std::byte* region, const ShmOptions& options)
      : options_(options),
        context_{ShmRegion(region, options.size),
                 options.rank,
                 ShmWaiter(ShmRegion(region, options.size), options.rank, options.spin, options.abort_after),
                 options.spin.count() == 0,
                 ShmGeometry(options.size, 0, 0, false),
                 0,
                 {},
                 std::vector<BucketCursor>(static_cast<size_t>(options.size)),
                 {},
                 PeerMemory(options.size),
                 {},
                 std::vector<const std::byte*>(static_cast<size_t>(options.size)),
                 std::vector<const void*>(static_cast<size_t>(options.size))} {
    context_.waiter.tell(&context_.watch);
    // A second backend over the same region goes on where the first one ended.
    const auto& reached = context_.region.progress(options.rank).reached;
    context_.chunk = reached[static_cast<int>(ShmStage::kReduced)].load(std::memory_order_relaxed);
  }

  std::string_view name() const override { return "shm"; }

  void run(const Bucket& bucket) override {
    check();
    context_.waiter.signals().begin(bucket.on_signal);
    context_.watch.start(bucket.trace, std::max<int64_t>(bucket.elements, 1));
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

  void check() override { context_.waiter.throw_if_stopped(); }

  void abort() noexcept override { context_.waiter.stop(ErrorCode::kPeerLost, -1); }

  std::vector<int> laggards() const override { return context_.waiter.laggards(); }

 private:
  // Note [Agreed geometry]
  // Ranks must cut a bucket alike, but spin and chunk size are each process's own settings. So in its first run() every
  // rank writes its own down, and all follow rank 0's.
  void agree() {
    ShmProgress& own = context_.region.progress(options_.rank);
    own.chunk_bytes.store(static_cast<uint32_t>(std::clamp<int64_t>(options_.chunk_bytes, 0, kShmMaxChunk)));
    own.direct_bytes.store(static_cast<uint64_t>(std::max<int64_t>(options_.direct_bytes, 0)));
    own.crowded.store(options_.spin.count() == 0 ? 1 : 0);
    context_.waiter.publish(ShmStage::kJoined, 1);
    context_.waiter.wait_for(0, ShmStage::kJoined, 1);
    const ShmProgress& root = context_.region.progress(0);
    context_.geometry =
        ShmGeometry(options_.size, root.chunk_bytes.load(), root.direct_bytes.load(), root.crowded.load() != 0);
    agreed_ = true;
  }

  void dispatch(const Bucket& bucket) {
    switch (bucket.kind) {
      case OpKind::kAllreduce:
        return allreduce(bucket);
      case OpKind::kBroadcast:
        return broadcast(bucket);
      case OpKind::kAllgather:
        return shm_allgather(context_, bucket);
      case OpKind::kAlltoall:
        return shm_alltoall(context_, bucket);
      case OpKind::kReduceScatter:
        return reduce_scatter(bucket);
      case OpKind::kBarrier:
      case OpKind::kJoin:
      case OpKind::kAddProcessSet:
      case OpKind::kRemoveProcessSet:
      case OpKind::kAdoptProcessSet:
        return;  // negotiation was all there is to them
    }
  }

  void allreduce(const Bucket& bucket) {
    const ReductionPlan plan = plan_reduction(bucket, options_.size);
    context_.cursor.assign(bucket, plan.format);
    if (bucket.elements == 0) return;
    const size_t bytes = static_cast<size_t>(bucket.elements) * context_.cursor.wire_bytes();
    const size_t chunk = context_.geometry.for_reduction(bytes);
    if (bucket.op == ReduceOp::kAdasum && options_.size > 1) {
      adasum(plan, bytes, chunk);
    } else if (chunk == 0) {
      shm_allreduce_once(context_, plan.reduction);
    } else {
      shm_allreduce_sliced(context_, plan.reduction, chunk);
    }
  }

  // Of one rank it is the scaled input, as a Sum is.
  void adasum(const ReductionPlan& plan, size_t bytes, size_t chunk) {
    if (chunk == 0 || context_.geometry.adasum_at_once(bytes)) {
      shm_adasum_once(context_, plan.reduction.scale.factor);
    } else {
      shm_adasum_sliced(context_, plan.reduction.scale.factor, chunk);
    }
  }

  void broadcast(const Bucket& bucket) {
    context_.cursor.assign(bucket, {bucket.dtype, bucket.dtype});
    context_.cursor.set_reads_inputs(options_.rank == bucket.root);
    shm_broadcast(context_, bucket.root);
  }

  void reduce_scatter(const Bucket& bucket) {
    const ReductionPlan plan = plan_reduction(bucket, options_.size);
    shm_reduce_scatter(context_, bucket, plan.reduction, plan.format);
  }

  ShmOptions options_;
  ShmContext context_;
  bool agreed_ = false;
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
