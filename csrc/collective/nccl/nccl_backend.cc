#include "collective/nccl/nccl_backend.h"

#include <exception>
#include <string>
#include <utility>

#include "collective/nccl/nccl_adasum.h"
#include "common/error.h"

namespace fusewire {
namespace {

class NcclBackend final : public Backend {
 public:
  NcclBackend(std::shared_ptr<GpuDevice> device, NcclApi& api, const GpuPlaneOptions& options, Backend& cpu,
              const NcclTuning& tuning)
      : context_(std::move(device), api, options, cpu, tuning) {}

  // In order where all is well: what is registered, then the communicator, then memory. By force elsewhere, and after
  // that the stream comes to rest.
  ~NcclBackend() override {
    try {
      if (context_.link.at_rest()) {
        context_.buffer.leave();
        context_.link.finish();
      }
    } catch (const std::exception&) {  // by force, then
    }
    context_.link.end();
    try {
      context_.device().mark()->synchronize();
      context_.buffer.free();
    } catch (const std::exception&) {  // CUDA has failed: the memory is lost
    }
  }

  std::string_view name() const override { return "nccl"; }

  void run(const Bucket& bucket) override {
    check();
    try {
      dispatch(bucket);
    } catch (const Error& error) {
      if (is_fatal(error.code())) abort();  // the others wait for what this member will not launch
      throw;
    } catch (const std::exception& error) {
      abort();
      throw Error(ErrorCode::kCollective, std::string("NCCL: ") + error.what(), context_.rank());
    }
  }

  void abort() noexcept override { context_.link.abort(); }
  void check() override { context_.link.check(); }
  std::vector<int> laggards() const override { return {}; }  // run() waits for nobody; NCCL does not say who is late

 private:
  void dispatch(const Bucket& bucket) {
    switch (bucket.kind) {
      case OpKind::kAllreduce:
        if (bucket.op == ReduceOp::kAdasum && context_.size() > 1) return nccl_adasum(context_, bucket);
        return nccl_allreduce(context_, bucket);
      case OpKind::kBroadcast:
        return nccl_broadcast(context_, bucket);
      case OpKind::kAllgather:
        return nccl_allgather(context_, bucket);
      case OpKind::kAlltoall:
        return nccl_alltoall(context_, bucket);
      case OpKind::kReduceScatter:
        return nccl_reduce_scatter(context_, bucket);
      case OpKind::kBarrier:
      case OpKind::kJoin:
      case OpKind::kAddProcessSet:
      case OpKind::kRemoveProcessSet:
      case OpKind::kAdoptProcessSet:
        return;  // negotiation was all there is to them
    }
  }

  NcclContext context_;
};

}  // namespace

std::unique_ptr<Backend> make_nccl_backend(std::shared_ptr<GpuDevice> device, NcclApi& api,
                                           const GpuPlaneOptions& options, Backend& cpu, const NcclTuning& tuning) {
  return std::make_unique<NcclBackend>(std::move(device), api, options, cpu, tuning);
}

}  // namespace fusewire
