#include "collective/gpu_choice.h"

#include <algorithm>
#include <map>

#include "collective/nccl/nccl_abi.h"
#include "common/error.h"

namespace fusewire {
namespace {

// The first that lets ranks share a GPU, where it is told to by an environment variable of its own.
constexpr int kNcclShares = nccl_version(2, 30, 3);

template <size_t kSize>
std::string text(const std::array<char, kSize>& field) {
  return {field.begin(), std::find(field.begin(), field.end(), '\0')};
}

std::string name(const GpuFacts& member) { return "rank " + std::to_string(member.rank); }

std::string version_of(const GpuFacts& member) {
  const int version = member.nccl_version;
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

// Why the members cannot use NCCL together; empty: they can.
std::string obstacle(std::span<const GpuFacts> members) {
  for (const GpuFacts& member : members) {
    if (member.nccl_version == 0) return name(member) + " has no NCCL: " + text(member.no_nccl);
  }
  const GpuFacts& first = members.front();
  for (const GpuFacts& member : members) {
    if (member.nccl_version != first.nccl_version) {
      return name(first) + " has NCCL " + version_of(first) + " and " + name(member) + " has " + version_of(member);
    }
  }
  const bool may_share = first.nccl_version >= kNcclShares &&
                         std::all_of(members.begin(), members.end(), [](const GpuFacts& m) { return m.shares_gpus; });
  if (may_share) return "";
  std::map<std::array<unsigned char, 16>, const GpuFacts*> seen;
  for (const GpuFacts& member : members) {
    const auto [found, is_new] = seen.emplace(member.gpu, &member);
    if (is_new) continue;
    return "ranks " + std::to_string(found->second->rank) + " and " + std::to_string(member.rank) +
           " use the same GPU of " + text(member.host) +
           ", which NCCL allows from 2.30.3 on where NCCL_MULTI_RANK_GPU_ENABLE=1 is set on all ranks (here: " +
           version_of(first) + ")";
  }
  return "";
}

}  // namespace

void GpuFacts::put(std::span<char> field, std::string_view text) {
  const size_t length = std::min(text.size(), field.size());
  std::copy_n(text.begin(), length, field.begin());
  std::fill(field.begin() + static_cast<ptrdiff_t>(length), field.end(), '\0');
}

GpuChoice choose_gpu_plane(std::span<const GpuFacts> members) {
  const std::string kind = text(members.front().kind);
  for (const GpuFacts& member : members) {
    if (member.kind == members.front().kind) continue;
    throw Error(ErrorCode::kCollective, "FUSEWIRE_GPU_BACKEND must be the same on all ranks, and is '" + kind +
                                            "' on " + name(members.front()) + " but '" + text(member.kind) + "' on " +
                                            name(member));
  }
  if (kind == "staged") return {false, "FUSEWIRE_GPU_BACKEND=staged"};
  std::string why = obstacle(members);
  if (kind == "nccl" && !why.empty()) {
    throw Error(ErrorCode::kCollective, "FUSEWIRE_GPU_BACKEND=nccl, but " + why);
  }
  return {why.empty(), std::move(why)};
}

}  // namespace fusewire
