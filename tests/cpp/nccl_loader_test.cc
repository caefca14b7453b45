// Which libraries are taken for an NCCL that can be used, and that every method reaches the function of its name with
// its arguments where they belong.
#include "collective/nccl/nccl_loader.h"

#include <dlfcn.h>
#include <gtest/gtest.h>

#include <cstring>

namespace fusewire::testing {
namespace {

std::string stub(int version) { return FUSEWIRE_STUB_DIR + std::to_string(version) + ".so"; }

TEST(NcclLoader, AVersionWithEverythingIsUsable) {
  const NcclLibrary opened = open_nccl(stub(22803));
  ASSERT_NE(opened.api, nullptr) << opened.facts.problem;
  EXPECT_EQ(opened.facts.problem, "");
  EXPECT_EQ(opened.facts.version, 22803);
  EXPECT_EQ(opened.api->version(), 22803);
  EXPECT_EQ(opened.facts.path, stub(22803));
  ASSERT_EQ(opened.facts.features.size(), 2u);
  for (const NcclFacts::Feature& feature : opened.facts.features) EXPECT_EQ(feature.why_off, "") << feature.name;
  EXPECT_TRUE(opened.api->supports_memory());
  EXPECT_TRUE(opened.api->supports_windows());
}

TEST(NcclLoader, AnOlderOneLacksAFeatureAndSaysSo) {
  const NcclLibrary opened = open_nccl(stub(22005));
  ASSERT_NE(opened.api, nullptr);
  EXPECT_TRUE(opened.api->supports_memory());
  EXPECT_FALSE(opened.api->supports_windows());
  EXPECT_EQ(opened.facts.features[1].why_off, "NCCL 2.20.5 has no ncclCommWindowRegister (2.27 and later)");
}

TEST(NcclLoader, TooOldAndTooNewAreRefusedByVersion) {
  for (const int version : {21805, 30000}) {
    const NcclLibrary opened = open_nccl(stub(version));
    EXPECT_EQ(opened.api, nullptr);
    EXPECT_EQ(opened.facts.version, version);
    EXPECT_NE(opened.facts.problem.find(nccl_version_text(version)), std::string::npos) << opened.facts.problem;
    EXPECT_NE(opened.facts.problem.find("2.19"), std::string::npos) << opened.facts.problem;
  }
}

TEST(NcclLoader, WhatIsNotThereOrIsNoNcclIsSaid) {
  EXPECT_NE(open_nccl("libnccl-of-nobody.so").facts.problem.find("torch has not loaded libnccl-of-nobody.so"),
            std::string::npos);
  const NcclLibrary other = open_nccl("libm.so.6");
  EXPECT_EQ(other.api, nullptr);
  EXPECT_NE(other.facts.problem.find("lacks ncclGetVersion, "), std::string::npos) << other.facts.problem;
}

TEST(NcclLoader, EveryCallArrivesWithItsArguments) {
  const NcclLibrary opened = open_nccl(stub(22803));
  NcclApi& nccl = *opened.api;
  NcclUniqueId id{};
  EXPECT_EQ(nccl.get_unique_id(id), NcclResult::kSuccess);
  NcclConfig config;
  config.blocking = 0;
  NcclComm comm = nullptr;
  EXPECT_EQ(nccl.init_rank_config(comm, 3, id, 2, config), NcclResult::kInProgress);
  EXPECT_EQ(comm, reinterpret_cast<NcclComm>(size_t{3002}));
  NcclResult error = NcclResult::kSuccess;
  EXPECT_EQ(nccl.get_async_error(comm, error), NcclResult::kSuccess);
  EXPECT_EQ(error, NcclResult::kRemoteError);
  EXPECT_EQ(nccl.describe(NcclResult::kInvalidUsage, comm), "invalid usage (last error: the stub was asked)");
  EXPECT_EQ(nccl.abort(comm), NcclResult::kUnhandledCudaError);
  EXPECT_EQ(nccl.finalize(comm), NcclResult::kSystemError);
  EXPECT_EQ(nccl.destroy(comm), NcclResult::kInternalError);
  EXPECT_EQ(nccl.group_start(), NcclResult::kSuccess);
  EXPECT_EQ(nccl.group_end(), NcclResult::kInProgress);
  int cell = 0;
  constexpr NcclResult kGood = NcclResult::kSuccess;
  EXPECT_EQ(nccl.all_reduce(&cell, comm, 11, NcclType::kBfloat16, NcclOp::kMax, comm, &cell), kGood);
  EXPECT_EQ(nccl.reduce(&cell, &cell, 12, NcclType::kFloat64, NcclOp::kMin, 1, comm, &cell), kGood);
  EXPECT_EQ(nccl.reduce_scatter(&cell, &cell, 13, NcclType::kFloat16, NcclOp::kProd, comm, &cell), kGood);
  EXPECT_EQ(nccl.all_gather(&cell, &cell, 14, NcclType::kUint8, comm, &cell), kGood);
  EXPECT_EQ(nccl.broadcast(&cell, &cell, 15, NcclType::kInt8, 2, comm, &cell), kGood);
  EXPECT_EQ(nccl.send(&cell, 16, NcclType::kInt64, 3, comm, &cell), kGood);
  EXPECT_EQ(nccl.recv(&cell, 17, NcclType::kUint64, 4, comm, &cell), kGood);
  void* memory = nullptr;
  EXPECT_EQ(nccl.mem_alloc(&memory, 4096), kGood);
  EXPECT_EQ(memory, reinterpret_cast<void*>(size_t{4096}));
  EXPECT_EQ(nccl.mem_free(memory), kGood);
  NcclWindow window = nullptr;
  EXPECT_EQ(nccl.window_register(comm, memory, 4096, window, kNcclWindowSymmetric), kGood);
  EXPECT_EQ(nccl.window_deregister(comm, window), kGood);
}

// A library that somebody has loaded is found although no path leads to it, and none is loaded beside it.
TEST(NcclLoader, WhatIsLoadedAlreadyIsTaken) {
  ASSERT_NE(dlopen(stub(22803).c_str(), RTLD_NOW | RTLD_LOCAL), nullptr);
  const NcclLibrary opened = open_nccl("libnccl_stub_22803.so");
  ASSERT_NE(opened.api, nullptr) << opened.facts.problem;
  EXPECT_EQ(opened.facts.path, stub(22803));
}

TEST(NcclLoader, WithoutOneTheProcessIsToldWhy) {
  std::string why;
  NcclApi* const nccl = find_nccl(&why);
  EXPECT_EQ(nccl == nullptr, !why.empty());  // this machine may have one
  EXPECT_EQ(nccl_facts().problem, why);
}

}  // namespace
}  // namespace fusewire::testing
