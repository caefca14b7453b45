#include "collective/mpi/mpi_backend.h"

#include <algorithm>
#include <string>
#include <utility>

#include "collective/mpi/mpi_context.h"
#include "common/error.h"

namespace fusewire {
namespace {

// Up to this many bytes in all contributions together, one round of messages costs less than two.
constexpr size_t kAtOnce = 64 << 10;

class MpiBackend final : public Backend {
 public:
  MpiBackend(std::shared_ptr<MpiJob> job, const MpiOptions& options, StopWord stop)
      : job_(std::move(job)), context_(job_, options, stop) {}

  std::string_view name() const override { return "mpi"; }

  void run(const Bucket& bucket) override {
    check();
    job_->process().call([&] {
      try {
        context_.link.signals().begin(bucket.on_signal);
        context_.link.begin(bucket.trace, std::max<int64_t>(bucket.elements, 1));
        dispatch(bucket);
      } catch (const Error& error) {
        fail(is_fatal(error.code()) ? error.code() : ErrorCode::kCollective);
        throw;
      } catch (const std::exception& error) {
        fail(ErrorCode::kCollective);
        throw Error(ErrorCode::kCollective, std::string("MPI: ") + error.what(), context_.rank());
      }
    });
  }

  void check() override { context_.link.stop().throw_if_stopped("an MPI collective"); }

  void abort() noexcept override { context_.link.stop().stop(ErrorCode::kPeerLost, -1); }

  std::vector<int> laggards() const override { return context_.link.laggards(); }

 private:
  // The others wait for what this rank will never send.
  void fail(ErrorCode code) {
    context_.link.stop().stop(code, context_.rank());
    context_.link.abandon();
  }

  void dispatch(const Bucket& bucket) {
    switch (bucket.kind) {
      case OpKind::kAllreduce:
        return allreduce(bucket);
      case OpKind::kBroadcast:
        context_.cursor.assign(bucket, {bucket.dtype, bucket.dtype});
        return mpi_broadcast(context_, bucket.root);
      case OpKind::kAllgather:
        return mpi_allgather(context_, bucket);
      case OpKind::kAlltoall:
        return mpi_alltoall(context_, bucket);
      case OpKind::kReduceScatter:
        return mpi_reduce_scatter(context_, bucket, plan_reduction(bucket, context_.size()));
      case OpKind::kBarrier:
      case OpKind::kJoin:
      case OpKind::kAddProcessSet:
      case OpKind::kRemoveProcessSet:
      case OpKind::kAdoptProcessSet:
        return;  // negotiation was all there is to them
    }
  }

  void allreduce(const Bucket& bucket) {
    const ReductionPlan plan = plan_reduction(bucket, context_.size());
    context_.cursor.assign(bucket, plan.format);
    if (bucket.elements == 0) return;
    const size_t bytes = static_cast<size_t>(bucket.elements) * context_.cursor.wire_bytes();
    const bool at_once = bytes * static_cast<size_t>(context_.size()) <= kAtOnce;
    if (bucket.op == ReduceOp::kAdasum && context_.size() > 1) {  // of one rank it is a Sum
      const double factor = plan.reduction.scale.factor;
      at_once ? mpi_adasum_at_once(context_, factor) : mpi_adasum_shared(context_, factor);
    } else if (at_once) {
      mpi_allreduce_at_once(context_, plan.reduction);
    } else {
      mpi_allreduce_sliced(context_, plan.reduction);
    }
  }

  const std::shared_ptr<MpiJob> job_;
  MpiContext context_;
};

}  // namespace

std::unique_ptr<Backend> make_mpi_backend(std::shared_ptr<MpiJob> job, const MpiOptions& options, StopWord stop) {
  return std::make_unique<MpiBackend>(std::move(job), options, stop);
}

}  // namespace fusewire
