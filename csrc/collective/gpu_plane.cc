#include "collective/gpu_plane.h"

#include <unistd.h>

#include <cstring>
#include <span>
#include <vector>

#include "collective/gpu_choice.h"
#include "collective/host_exchange.h"
#include "collective/nccl/nccl_backend.h"
#include "collective/staged/staged_backend.h"
#include "common/error.h"

namespace fusewire {
namespace {

GpuFacts facts_of(const OpenGpu& gpu, const GpuPlaneOptions& options) {
  GpuFacts facts;
  facts.gpu = gpu.device->api().uuid();
  facts.rank = options.job_rank;
  GpuFacts::put(facts.kind, options.kind);
  facts.shares_gpus = options.nccl_shares_gpus;
  if (gethostname(facts.host.data(), facts.host.size() - 1) != 0) GpuFacts::put(facts.host, "this host");
  if (gpu.nccl != nullptr) facts.nccl_version = gpu.nccl->version();
  GpuFacts::put(facts.no_nccl, gpu.no_nccl);
  return facts;
}

}  // namespace

std::unique_ptr<Backend> make_gpu_plane(const OpenGpu& gpu, const GpuPlaneOptions& options, Backend& cpu,
                                        std::string* why) {
  const GpuFacts mine = facts_of(gpu, options);
  const std::vector<std::byte> all = exchange_on_host(cpu, options.size, std::as_bytes(std::span(&mine, 1)));
  std::vector<GpuFacts> members(static_cast<size_t>(options.size));
  std::memcpy(members.data(), all.data(), all.size());
  GpuChoice choice = choose_gpu_plane(members);
  *why = std::move(choice.why);
  if (choice.nccl) return make_nccl_backend(gpu.device, *gpu.nccl, options, cpu);
  return make_staged_backend(gpu.device, options, cpu);
}

}  // namespace fusewire
