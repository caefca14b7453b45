// Ranks with a GPU and an NCCL each, as threads: all of them doubles, and a shared-memory plane to meet over.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "collective/nccl/nccl_backend.h"
#include "gpu_world.h"
#include "simt/nccl_double.h"

namespace fusewire::testing {

// Small enough that small tensors are large, and that a bucket has several rows.
constexpr NcclTuning kSmallTuning{.buffer_bytes = 4096, .direct_bytes = 1024};

struct NcclRank {
  NcclRank(NcclFabric& fabric, int rank, uint64_t seed)
      : gpu(seed * 16 + static_cast<uint64_t>(rank), fabric.world), nccl(fabric, *gpu.cuda) {}
  ~NcclRank() {
    plane.reset();
    gpu.cuda->drain();
  }
  NcclRank(const NcclRank&) = delete;
  NcclRank& operator=(const NcclRank&) = delete;

  void start(Backend& cpu, GpuPlaneOptions options, const NcclTuning& tuning = kSmallTuning) {
    plane = make_nccl_backend(gpu.device, nccl, options, cpu, tuning);
    to_the_end = std::make_unique<ToTheEnd>(*plane, gpu);
  }

  GpuOfRank gpu;
  NcclDouble nccl;
  std::unique_ptr<Backend> plane;
  std::unique_ptr<ToTheEnd> to_the_end;
};

inline ShmOptions meeting_place() {
  ShmOptions options;
  options.chunk_bytes = 4096;
  options.spin = std::chrono::microseconds(0);
  return options;
}

inline std::string join_sentences(const std::vector<std::string>& sentences) {
  std::string text;
  for (const std::string& sentence : sentences) text += sentence + "; ";
  return text;
}

// `body` on every rank, each with an NCCL of its own that `prepare` may change. "" when all were content and no double
// has found a mistake.
using NcclBody = std::function<std::string(int rank, NcclRank& self, Backend& cpu)>;
inline std::string with_nccl(int size, uint64_t seed, const NcclBody& body) {
  NcclFabric fabric;
  std::string faults = run_threads(size, meeting_place(), [&](int rank, Backend& cpu) -> std::string {
    NcclRank self(fabric, rank, seed);
    std::string fault = body(rank, self, cpu);
    self.plane.reset();
    if (fault.empty()) fault = self.gpu.mistakes();
    if (fault.empty() && self.nccl.open_communicators() != 0) fault = "a communicator is left";
    return fault;
  });
  return faults + join_sentences(fabric.mistakes());
}

}  // namespace fusewire::testing
