// What every rank brings to an allgather or an alltoall reaches every other rank, in member order.
#include "control_simulation.h"

namespace fusewire {
namespace {

using Extents = std::vector<int64_t>;

ErrorCode refusal(Simulation& job, const UnitSpec& spec, const Extents& extents, const std::string& word,
                  const std::vector<bool>& absent = {}) {
  try {
    job.submit(0, spec, absent, extents);
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    return error.code();
  }
  ADD_FAILURE() << "accepted " << spec.name;
  return ErrorCode::kInternal;
}

TEST(ControlExtents, AllgatherOfGroupsCachedOrNot) {
  for (const int64_t capacity : {0, 4096}) {
    Config config;
    config.cache_capacity = capacity;
    Simulation job(3, config);
    const UnitSpec spec = make_uneven(OpKind::kAllgather, "g", 2);
    for (int64_t round = 0; round < 3; ++round) {
      for (int rank = 0; rank < 3; ++rank) job.submit(rank, spec, {}, {rank + round, rank == 1 ? 0 : 9});
      job.run();
      for (int rank = 0; rank < 3; ++rank) {
        ASSERT_EQ(job[rank].ran.size(), static_cast<size_t>(round) + 1);
        EXPECT_EQ(job[rank].ran.back().extents.back(), (Extents{round, 9, round + 1, 0, round + 2, 9}));
      }
    }
    EXPECT_EQ(job[0].id_requests, capacity == 0 ? 0u : 2u);
    job.expect_idle();
  }
}

TEST(ControlExtents, AlltoallInASetInMemberOrder) {
  Simulation job(4, Config{});
  job.submit_everywhere(make_set("s", {0, 3}));
  job.run();
  UnitSpec spec = make_uneven(OpKind::kAlltoall, "x");
  spec.process_set = 1;
  for (int round = 0; round < 2; ++round) {
    job.submit(3, spec, {}, {30, 33});
    job.run();
    job.submit(0, spec, {}, {0, 3});
    job.run();
    for (const int rank : {0, 3}) EXPECT_EQ(job[rank].ran.back().extents.back(), (Extents{0, 3, 30, 33}));
  }
}

TEST(ControlExtents, WhoIsAbsentBringsNothing) {
  Simulation job(2, Config{});
  const UnitSpec gather = make_uneven(OpKind::kAllgather, "g", 2);
  job.submit(0, gather, {true, false}, {5, 6});
  job.submit(1, gather, {true, true}, {7, 8});
  job.run();
  EXPECT_EQ(job[0].ran.back().extents.back(), (Extents{0, 6, 0, 0}));
  EXPECT_EQ(job[0].ran.back().skipped.back(), (std::vector<bool>{true, false}));

  for (int rank = 0; rank < 2; ++rank) job.submit(rank, gather, {true, true}, {1, 2});
  job.run();
  EXPECT_TRUE(job[1].ran.back().skip);
  EXPECT_EQ(job[1].ran.back().extents.back(), (Extents{0, 0, 0, 0}));
}

TEST(ControlExtents, TheSubmitterIsToldWhatIsWrong) {
  Simulation job(2, Config{});
  const UnitSpec gather = make_uneven(OpKind::kAllgather, "g", 2);
  const UnitSpec exchange = make_uneven(OpKind::kAlltoall, "x");
  EXPECT_EQ(refusal(job, gather, {1}, "'g': 1 extents for 2 tensors"), ErrorCode::kInvalidArgument);
  EXPECT_EQ(refusal(job, gather, {}, "needed: 2"), ErrorCode::kInvalidArgument);
  EXPECT_EQ(refusal(job, gather, {1, -1}, "negative"), ErrorCode::kInvalidArgument);
  EXPECT_EQ(refusal(job, exchange, {1, 2, 3}, "3 splits for 1 tensor and 2 members"), ErrorCode::kInvalidArgument);
  EXPECT_EQ(refusal(job, make_unit("y"), {1}, "needed: 0"), ErrorCode::kInvalidArgument);
  for (const OpKind kind : {OpKind::kAllgather, OpKind::kAlltoall, OpKind::kReduceScatter}) {
    UnitSpec flat = make_unit("z", {});
    flat.kind = kind;
    EXPECT_EQ(refusal(job, flat, {}, "without dimensions"), ErrorCode::kInvalidArgument);
  }
  job.expect_idle();
}

TEST(ControlExtents, TogetherTooMuchIsAnErrorOnAllRanks) {
  for (const OpKind kind : {OpKind::kAllgather, OpKind::kAlltoall}) {
    Simulation job(2, Config{});
    const UnitSpec spec = make_uneven(kind, "x");
    const int64_t many = int64_t{1} << 59;  // times 8 bytes: 2^62
    const Extents extents = kind == OpKind::kAllgather ? Extents{many} : Extents{many, 0};
    for (int round = 0; round < 2; ++round) {
      for (int rank = 0; rank < 2; ++rank) job.submit(rank, spec, {}, extents);
      job.run();
      for (int rank = 0; rank < 2; ++rank) {
        ASSERT_EQ(job[rank].failed.size(), static_cast<size_t>(round) + 1);
        EXPECT_EQ(job[rank].failed.back().code, ErrorCode::kInvalidArgument);
        EXPECT_NE(job[rank].failed.back().message.find("fits no memory"), std::string::npos);
      }
    }
    job.expect_idle();
  }
}

// Rows differ; everything else must not.
TEST(ControlExtents, MismatchesAreFoundAsEver) {
  Simulation job(3, Config{});
  UnitSpec wide = make_uneven(OpKind::kAllgather, "g");
  wide.tensors.front().shape = {-1, 3};
  job.submit(0, make_uneven(OpKind::kAllgather, "g"), {}, {1});
  job.submit(1, wide, {}, {2});
  job.submit(2, make_uneven(OpKind::kAlltoall, "g"), {}, {1, 2, 3});
  job.run();
  for (int rank = 0; rank < 3; ++rank) {
    ASSERT_EQ(job[rank].failed.size(), 1u);
    EXPECT_EQ(job[rank].failed.front().code, ErrorCode::kTensorMismatch);
  }
  for (int rank = 0; rank < 3; ++rank) job.submit(rank, wide, {}, {rank});
  job.run();
  EXPECT_EQ(job[1].ran.back().extents.back(), (Extents{0, 1, 2}));
  job.expect_idle();
}

TEST(ControlExtents, TheRootTrustsNobody) {
  for (const Extents& extents : {Extents{}, Extents{1, 2}, Extents{-1}}) {
    Coordinator coordinator(2, Config{});
    RequestList message;
    Request& request = message.requests.emplace_back();
    request.spec = std::make_unique<UnitSpec>(make_uneven(OpKind::kAllgather, "g"));
    request.extents = extents;
    coordinator.receive(1, std::move(message), TimePoint{});
    const auto response = coordinator.poll(TimePoint{});
    ASSERT_TRUE(response && response->fatal);
    EXPECT_EQ(response->fatal->rank, 1);
    EXPECT_NE(response->fatal->message.find("protocol"), std::string::npos);
  }
}

// A bucket is as large as what all ranks bring.
TEST(ControlExtents, FusionCountsWhatAllBring) {
  Config config;
  config.fusion_threshold = 1000;
  Simulation job(2, config);
  job.hold_completions = true;
  const auto gather = [&](const std::string& name, int64_t rows) {
    job.submit_everywhere(make_uneven(OpKind::kAllgather, name), {}, {rows});
    job.run();
  };
  gather("a", 1);
  gather("b", 1);   // two under way: now units gather
  gather("c", 50);  // 8 bytes a row on each of 2 ranks
  gather("d", 12);
  EXPECT_EQ(job[0].ran.size(), 2u);
  gather("e", 1);  // would make it 1008 bytes
  ASSERT_EQ(job[0].ran.size(), 3u);
  EXPECT_EQ(job[0].ran.back().names, (std::vector<std::string>{"c", "d"}));
  gather("f", 63);  // too large for company
  EXPECT_EQ(job[0].ran.back().names, std::vector<std::string>{"f"});
  job.hold_completions = false;
  job.run();
  job.expect_idle();
}

}  // namespace
}  // namespace fusewire
