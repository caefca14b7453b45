// The decision of Note [Which plane for a GPU], as a function of what the members of a set tell each other.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>

namespace fusewire {

// What one member can do. Sent as it is in memory, between equal builds.
struct GpuFacts {
  std::array<unsigned char, 16> gpu{};  // CudaApi::uuid()
  int32_t rank = 0;                     // in the job
  int32_t nccl_version = 0;             // 0: it has none
  bool shares_gpus = false;             // its NCCL was told that ranks may share one
  std::array<char, 16> kind{};          // Config::gpu_backend
  std::array<char, 64> host{};
  std::array<char, 200> no_nccl{};  // why there is none

  static void put(std::span<char> field, std::string_view text);  // cut to what fits
};
static_assert(std::is_trivially_copyable_v<GpuFacts>);

struct GpuChoice {
  bool nccl = false;
  std::string why;  // it is not NCCL
};

// Throws Error(kCollective) where members were told different things, or to use what cannot be had.
GpuChoice choose_gpu_plane(std::span<const GpuFacts> members);

}  // namespace fusewire
