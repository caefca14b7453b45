// Which plane a set's CUDA tensors get, and what happens where it is aborted while it is made.
#include "collective/gpu_plane.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "collective/gpu_choice.h"
#include "common/error.h"
#include "engine/plane.h"

namespace fusewire::testing {
namespace {

// Rank 10 + i uses GPU i of its own, all with the same NCCL.
std::vector<GpuFacts> members(int count, const char* kind = "auto", int version = 22803) {
  std::vector<GpuFacts> all(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    GpuFacts& facts = all[static_cast<size_t>(i)];
    facts.gpu[3] = static_cast<unsigned char>(i);
    facts.rank = 10 + i;
    facts.nccl_version = version;
    GpuFacts::put(facts.kind, kind);
    GpuFacts::put(facts.host, "node7");
  }
  return all;
}

std::string why_not(const std::vector<GpuFacts>& facts) {
  const GpuChoice choice = choose_gpu_plane(facts);
  EXPECT_EQ(choice.nccl, choice.why.empty());
  return choice.why;
}

std::string error_of(const std::vector<GpuFacts>& facts) {
  try {
    choose_gpu_plane(facts);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kCollective);
    return error.what();
  }
  return "";
}

TEST(GpuChoice, NcclWhereAllHaveTheSameOnGpusOfTheirOwn) {
  for (const int count : {1, 2, 8}) {
    EXPECT_EQ(why_not(members(count)), "");
    EXPECT_EQ(why_not(members(count, "nccl")), "");
    EXPECT_EQ(why_not(members(count, "staged")), "FUSEWIRE_GPU_BACKEND=staged");
  }
}

TEST(GpuChoice, ARankWithoutNccl) {
  std::vector<GpuFacts> facts = members(3);
  facts[1].nccl_version = 0;
  GpuFacts::put(facts[1].no_nccl, "no libnccl.so.2 was found");
  EXPECT_EQ(why_not(facts), "rank 11 has no NCCL: no libnccl.so.2 was found");
  for (GpuFacts& one : facts) GpuFacts::put(one.kind, "nccl");
  EXPECT_EQ(error_of(facts), "FUSEWIRE_GPU_BACKEND=nccl, but rank 11 has no NCCL: no libnccl.so.2 was found");
}

TEST(GpuChoice, DifferentVersions) {
  std::vector<GpuFacts> facts = members(3);
  facts[2].nccl_version = 22705;
  EXPECT_EQ(why_not(facts), "rank 10 has NCCL 2.28.3 and rank 12 has 2.27.5");
}

TEST(GpuChoice, TwoRanksOnOneGpu) {
  for (const int version : {22803, 23002, 23003, 23100}) {
    for (const int told : {0, 2, 3}) {  // so many ranks are told that they may share
      std::vector<GpuFacts> facts = members(3, "auto", version);
      facts[2].gpu = facts[0].gpu;
      for (int i = 0; i < told; ++i) facts[static_cast<size_t>(i)].shares_gpus = true;
      const bool allowed = version >= 23003 && told == 3;
      const std::string why = why_not(facts);
      EXPECT_EQ(why.empty(), allowed) << version << " " << told;
      if (!allowed) {
        EXPECT_EQ(why.find("ranks 10 and 12 use the same GPU of node7"), 0u) << why;
        EXPECT_NE(why.find("NCCL_MULTI_RANK_GPU_ENABLE=1"), std::string::npos) << why;
      }
    }
  }
}

TEST(GpuChoice, RanksThatWereToldDifferentThings) {
  std::vector<GpuFacts> facts = members(2);
  GpuFacts::put(facts[1].kind, "staged");
  EXPECT_EQ(error_of(facts),
            "FUSEWIRE_GPU_BACKEND must be the same on all ranks, and is 'auto' on rank 10 but 'staged' on rank 11");
}

TEST(GpuChoice, LongTextsAreCut) {
  std::vector<GpuFacts> facts = members(1);
  facts[0].nccl_version = 0;
  GpuFacts::put(facts[0].no_nccl, std::string(1000, 'x'));
  EXPECT_EQ(why_not(facts), "rank 10 has no NCCL: " + std::string(200, 'x'));
}

struct CountedPlane final : Backend {
  explicit CountedPlane(std::atomic<int>& count) : aborts(count) {}
  std::string_view name() const override { return "counted"; }
  void run(const Bucket&) override {}
  void abort() noexcept override { ++aborts; }
  void check() override {}
  std::vector<int> laggards() const override { return {}; }
  std::atomic<int>& aborts;
};

// Note [A plane made late]
TEST(GpuPlaneSlot, APlaneIsAbortedHoweverMakingAndAbortingMeet) {
  for (int round = 0; round < 500; ++round) {
    std::atomic<int> aborts{0};
    GpuPlaneSlot slot;
    std::atomic<bool> go{false};
    std::thread watcher([&] {
      while (!go.load()) {
      }
      slot.abort();
    });
    go.store(true);
    slot.put(std::make_unique<CountedPlane>(aborts), "why");
    watcher.join();
    EXPECT_GE(aborts, 1);
    EXPECT_TRUE(slot.aborted());
    EXPECT_EQ(slot.why(), "why");
  }
}

}  // namespace
}  // namespace fusewire::testing
