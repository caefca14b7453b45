// The double of NCCL sees what it is there to see.
#include <gtest/gtest.h>

#include <algorithm>
#include <future>

#include "simt/nccl_double.h"

namespace fusewire::testing {
namespace {

// Two communicators, made by hand.
struct Pair {
  Pair() : cuda{CudaDouble(1, fabric.world), CudaDouble(2, fabric.world)} {
    NcclUniqueId id;
    nccl[0].get_unique_id(id);
    NcclConfig config;
    config.blocking = 0;
    for (int r = 0; r < 2; ++r) {
      stream[r] = cuda[r].create_stream();
      cuda[r].with_current([&] { nccl[r].init_rank_config(comm[r], 2, id, r, config); });
    }
    NcclResult error = NcclResult::kSuccess;
    for (int r = 0; r < 2; ++r) nccl[r].get_async_error(comm[r], error);
  }
  NcclResult sum(int r, size_t count, NcclType type = NcclType::kFloat32) {
    return nccl[r].all_reduce(values, values, count, type, NcclOp::kSum, comm[r], stream[r]);
  }

  NcclFabric fabric;
  CudaDouble cuda[2];
  NcclDouble nccl[2] = {NcclDouble(fabric, cuda[0]), NcclDouble(fabric, cuda[1])};
  CudaApi::Stream stream[2];
  NcclComm comm[2] = {};
  float values[8] = {};
};

std::string first_mistake(const NcclFabric& fabric) {
  const auto mistakes = fabric.mistakes();
  return mistakes.empty() ? "" : mistakes.front();
}

TEST(NcclDoubleTest, OtherCountsTypesAndCallsAreMistakes) {
  {
    Pair pair;
    pair.sum(0, 4);
    pair.sum(1, 3);
    EXPECT_EQ(first_mistake(pair.fabric), "collective 1: rank 1 calls all_reduce of 3, rank 0 all_reduce of 4");
  }
  {
    Pair pair;
    pair.sum(0, 4);
    pair.nccl[1].broadcast(pair.values, pair.values, 4, NcclType::kFloat32, 0, pair.comm[1], pair.stream[1]);
    EXPECT_EQ(first_mistake(pair.fabric), "collective 1: rank 1 calls broadcast of 4, rank 0 all_reduce of 4");
  }
  {
    Pair pair;
    pair.sum(0, 4);
    pair.sum(1, 4, NcclType::kFloat16);
    EXPECT_NE(first_mistake(pair.fabric), "");
  }
}

TEST(NcclDoubleTest, SendsOutsideOfAGroupAreMistakes) {
  Pair pair;
  pair.nccl[0].send(pair.values, 4, NcclType::kFloat32, 1, pair.comm[0], pair.stream[0]);
  EXPECT_EQ(first_mistake(pair.fabric), "send outside of a group waits for its counterpart alone");
}

TEST(NcclDoubleTest, CallsOnACommunicatorThatIsGoneOrBusyAreMistakes) {
  {
    Pair pair;
    pair.nccl[0].abort(pair.comm[0]);
    EXPECT_EQ(pair.sum(0, 4), NcclResult::kInvalidArgument);
    EXPECT_EQ(first_mistake(pair.fabric), "all_reduce on a communicator that is gone");
  }
  {
    Pair pair;
    pair.nccl[0].slow_polls = 1;
    EXPECT_EQ(pair.sum(0, 4), NcclResult::kInProgress);
    pair.sum(0, 4);
    EXPECT_EQ(first_mistake(pair.fabric), "all_reduce on a communicator that is still busy");
  }
}

TEST(NcclDoubleTest, WorkOnTheDeviceWaitsForBothAndForTheirStreams) {
  Pair pair;
  float other[8] = {1, 1, 1, 1, 1, 1, 1, 1};
  pair.cuda[0].launch("the model", pair.stream[0], {{pair.values, sizeof(pair.values), true}},
                      [&] { std::fill(std::begin(pair.values), std::end(pair.values), 2.0F); });
  pair.sum(0, 8);
  const auto event = pair.cuda[0].create_event(false);
  pair.cuda[0].record(event, pair.stream[0]);
  auto waiter = std::async(std::launch::async, [&] { pair.cuda[0].synchronize(event); });
  for (int i = 0; i < 10; ++i) EXPECT_FALSE(pair.cuda[0].reached(event));
  pair.nccl[1].all_reduce(other, other, 8, NcclType::kFloat32, NcclOp::kSum, pair.comm[1], pair.stream[1]);
  waiter.get();
  pair.cuda[1].drain();
  EXPECT_EQ(pair.values[7], 3.0F);
  EXPECT_EQ(other[0], 3.0F);
  EXPECT_EQ(first_mistake(pair.fabric), "");
}

}  // namespace
}  // namespace fusewire::testing
