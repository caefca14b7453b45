// A rank that has joined is absent for everything, until all have.
#include <algorithm>

#include "control_simulation.h"

namespace fusewire {
namespace {

using Names = std::vector<std::string>;
using Extents = std::vector<int64_t>;

UnitSpec in_set(UnitSpec spec, uint32_t set) {
  spec.process_set = set;
  return spec;
}

UnitSpec make_broadcast(const std::string& name, int root) {
  UnitSpec spec = make_unit(name);
  spec.kind = OpKind::kBroadcast;
  spec.root = root;
  return spec;
}

void expect_refused(Simulation& job, int rank, const UnitSpec& spec) {
  try {
    job.submit(rank, spec);
    ADD_FAILURE() << "accepted " << spec.name;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("wait for that"), std::string::npos) << error.what();
  }
}

// The last thing that each rank has run is the answer to the join, which tells who came last.
void expect_all_joined(Simulation& job, int last) {
  for (int rank = 0; rank < job.size(); ++rank) {
    ASSERT_FALSE(job[rank].fatal) << job[rank].fatal->message;
    ASSERT_FALSE(job[rank].ran.empty());
    EXPECT_EQ(job[rank].ran.back().names, Names{std::string(kJoinName)});
    EXPECT_EQ(job[rank].ran.back().extents.back(), Extents{last});
    EXPECT_TRUE(job[rank].failed.empty());
  }
  job.expect_idle();
}

void expect_same_buckets(Simulation& job) {
  for (int rank = 1; rank < job.size(); ++rank) {
    ASSERT_EQ(job[rank].ran.size(), job[0].ran.size());
    for (size_t i = 0; i < job[0].ran.size(); ++i) EXPECT_TRUE(job[rank].ran[i].same_bucket(job[0].ran[i]));
  }
}

TEST(ControlJoin, EverybodyLearnsWhoCameLast) {
  Simulation job(4, Config{});
  for (const int last : {2, 0, 3}) {
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == last) continue;
      job.submit(rank, make_join());
      job.run();
    }
    EXPECT_EQ(job[last].participant->pending(), 0u);
    job.submit(last, make_join());
    job.run();
    expect_all_joined(job, last);
    job.submit_everywhere(make_unit("between"));  // everything is as before
    job.run();
    EXPECT_EQ(job.order(last).back(), "between");
    EXPECT_FALSE(job[last].ran.back().unasked.front());
  }
}

TEST(ControlJoin, OneRank) {
  Simulation job(1, Config{});
  job.submit(0, make_join());
  job.run();
  expect_all_joined(job, 0);
}

TEST(ControlJoin, JoinedRanksRunWhatTheOthersSubmit) {
  for (const int64_t capacity : {0, 1, 4096}) {
    Config config;
    config.cache_capacity = capacity;
    Simulation job(3, config);
    job.submit_everywhere(make_unit("known"));
    job.run();
    job.submit(2, make_join());
    job.run();
    for (int round = 0; round < 3; ++round) {
      for (const int rank : {0, 1}) {
        job.submit(rank, make_unit("known"));
        job.submit(rank, make_unit("never seen"));
        job.submit(rank, make_group("group", 2), {rank == 0, true});
        job.submit(rank, make_unit("skipped"), {true});
        job.submit(rank, make_uneven(OpKind::kAllgather, "rows"), {}, {rank + 5});
      }
      job.run();
    }
    const auto rows =
        std::find_if(job[2].ran.begin(), job[2].ran.end(), [](const auto& ran) { return ran.names == Names{"rows"}; });
    ASSERT_NE(rows, job[2].ran.end());
    EXPECT_EQ(rows->extents.front(), (Extents{5, 6, 0}));
    EXPECT_TRUE(rows->unasked.front());
    for (const int rank : {0, 1}) job.submit(rank, make_join());
    job.run();
    expect_same_buckets(job);
    expect_all_joined(job, job[0].ran.back().extents.back().front() == 0 ? 0 : 1);

    // Its mirror of the cache is everybody's: what it learned while it had joined it announces by number.
    job.forget_results();
    for (int rank = 0; rank < 3; ++rank) {
      job.submit(rank, make_unit("never seen"));
      job.submit(rank, make_group("group", 2));
    }
    job.run();
    if (capacity == 4096) {
      EXPECT_EQ(job[2].id_requests, 2u);
    }
    expect_same_buckets(job);
    job.expect_idle();
  }
}

TEST(ControlJoin, WhatWaitedForItGoesOn) {
  Simulation job(3, Config{});
  for (const int rank : {0, 1}) job.submit(rank, make_unit("x"));
  job.submit(0, make_unit("y"));
  job.run();
  EXPECT_TRUE(job.order(0).empty());
  job.submit(2, make_join());
  job.run();
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(job.order(rank), Names{"x"});
  job.submit(1, make_join());
  job.run();
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(job.order(rank), (Names{"x", "y"}));
  EXPECT_TRUE(job[1].ran.back().unasked.front());
  EXPECT_FALSE(job[1].ran.front().unasked.front());
  job.submit(0, make_join());
  job.run();
  expect_all_joined(job, 0);
}

// It has submitted "mine" itself: it brings its own rows, and is not counted twice.
TEST(ControlJoin, WhatItHasInFlightItselfCountsOnce) {
  Simulation job(3, Config{});
  job.submit(2, make_uneven(OpKind::kAllgather, "mine"), {}, {7});
  job.submit(2, make_join());
  job.run();
  job.submit(0, make_uneven(OpKind::kAllgather, "mine"), {}, {1});
  job.run();
  EXPECT_TRUE(job.order(2).empty());
  job.submit(1, make_uneven(OpKind::kAllgather, "mine"), {}, {2});
  job.run();
  EXPECT_EQ(job[2].ran.back().extents.front(), (Extents{1, 2, 7}));
  EXPECT_FALSE(job[2].ran.back().unasked.front());
  for (const int rank : {0, 1}) job.submit(rank, make_uneven(OpKind::kAllgather, "mine"), {}, {rank});
  job.run();
  EXPECT_EQ(job[2].ran.back().extents.front(), (Extents{0, 1, 0}));
  EXPECT_TRUE(job[2].ran.back().unasked.front());
  job.submit(1, make_join());
  job.run();
  job.submit(0, make_join());
  job.run();
  expect_all_joined(job, 0);
}

TEST(ControlJoin, ItMaySubmitNothingUntilAllHaveJoined) {
  Simulation job(2, Config{});
  job.submit(1, make_join());
  expect_refused(job, 1, make_unit("x"));
  expect_refused(job, 1, make_join());
  expect_refused(job, 1, make_set("s", {0}));
  job.run();
  expect_refused(job, 1, make_unit("x"));
  job.submit(0, make_unit("x"));  // the others are not disturbed
  job.run();
  EXPECT_EQ(job.order(0), Names{"x"});
  job.submit(0, make_join());
  job.run();
  expect_all_joined(job, 0);
  job.submit_everywhere(make_unit("x"));
  job.run();
  EXPECT_EQ(job.order(1), (Names{"x", "join()", "x"}));
}

TEST(ControlJoin, ItsNameIsItsOwn) {
  Simulation job(1, Config{});
  UnitSpec named = make_join();
  named.name = "x";
  EXPECT_THROW(job.submit(0, named), Error);
  EXPECT_THROW(job.submit(0, make_unit(std::string(kJoinName))), Error);
  UnitSpec scaled = make_join();
  scaled.prescale = 2;
  EXPECT_THROW(job.submit(0, scaled), Error);
  job.expect_idle();
}

TEST(ControlJoin, ARootThatHasJoinedBroadcastsNothing) {
  Simulation job(3, Config{});
  job.submit(1, make_broadcast("before", 1));  // it gives its data before it joins
  job.submit(1, make_join());
  job.run();
  for (const int rank : {0, 2}) {
    job.submit(rank, make_broadcast("before", 1));
    job.submit(rank, make_broadcast("after", 1));
    job.submit(rank, make_broadcast("other", 2));
  }
  job.run();
  for (const int rank : {0, 2}) {
    ASSERT_EQ(job[rank].failed.size(), 1u);
    const auto& failed = job[rank].failed.front();
    EXPECT_EQ(failed.name, "after");
    EXPECT_EQ(failed.code, ErrorCode::kInvalidArgument);
    EXPECT_EQ(failed.rank, 1);
    EXPECT_NE(failed.message.find("rank 1, has joined"), std::string::npos) << failed.message;
  }
  EXPECT_TRUE(job[1].failed.empty());
  for (int rank = 0; rank < 3; ++rank) {
    Names order = job.order(rank);
    std::sort(order.begin(), order.end());
    EXPECT_EQ(order, (Names{"before", "other"}));
  }
  // Nobody owes anything: the name works again at once.
  for (const int rank : {0, 2}) job.submit(rank, make_join());
  job.run();
  job.submit_everywhere(make_broadcast("after", 1));
  job.run();
  EXPECT_EQ(job.order(1).back(), "after");
}

TEST(ControlJoin, MismatchesAmongTheOthersAreTheirs) {
  Simulation job(3, Config{});
  job.submit(2, make_join());
  job.run();
  job.submit(0, make_unit("x", {1}));
  job.submit(1, make_unit("x", {2}));
  job.run();
  for (const int rank : {0, 1}) {
    ASSERT_EQ(job[rank].failed.size(), 1u);
    EXPECT_EQ(job[rank].failed.front().code, ErrorCode::kTensorMismatch);
    EXPECT_EQ(job[rank].failed.front().message.find("rank 2"), std::string::npos);
    job.submit(rank, make_join());
  }
  job.run();
  EXPECT_TRUE(job[2].failed.empty());
  job.submit_everywhere(make_unit("x", {2}));
  job.run();
  EXPECT_EQ(job.order(2).back(), "x");
  job.expect_idle();
}

// The error and the answer to the join arrive in one message; the joined rank must not take the error for a debt.
TEST(ControlJoin, AnErrorBesideTheAnswerIsNoDebt) {
  Simulation job(3, Config{});
  job.lazy_root = true;
  job.submit(2, make_join());
  job.run();
  job.submit(0, make_broadcast("x", 2));
  job.submit(1, make_broadcast("x", 2));
  for (const int rank : {0, 1}) job.submit(rank, make_join());
  for (const int rank : {0, 1}) job.send(rank);
  for (const int rank : {0, 1}) job.deliver_up(rank);
  job.run();
  EXPECT_EQ(job[0].failed.size(), 1u);
  job.submit_everywhere(make_broadcast("x", 2));
  job.run();
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(job.order(rank).back(), "x");
}

// A rank owed "x" when the others gave up waiting for it. Joining settles that.
TEST(ControlJoin, JoiningSettlesDebts) {
  for (const bool knows : {false, true}) {
    Config config;
    config.stall_check_seconds = 0;
    config.stall_abort_seconds = 10;
    Simulation job(3, config);
    job.submit(0, make_unit("x", {1}));
    job.submit(1, make_unit("x", {2}));
    job.run();
    job.advance(std::chrono::seconds(11));
    if (knows) job.run();
    job.submit(2, make_join());
    job.run();
    for (const int rank : {0, 1}) {
      ASSERT_EQ(job[rank].failed.size(), 1u);
      job.submit(rank, make_unit("x", {2}));
    }
    job.run();
    EXPECT_EQ(job.order(2), Names{"x"});
    for (const int rank : {0, 1}) job.submit(rank, make_join());
    job.run();
    job.submit_everywhere(make_unit("x", {2}));
    job.run();
    for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(job.order(rank), (Names{"x", "join()", "x"}));
    job.expect_idle();
  }
}

TEST(ControlJoin, WhatIsHeldBackForFusionComesBeforeTheAnswer) {
  Simulation job(3, Config{});
  job.submit_everywhere(make_set("pair", {1, 2}));
  job.run();
  job.hold_completions = true;
  job.submit(2, make_join());
  job.run();
  for (int i = 0; i < 5; ++i) {
    for (const int rank : {0, 1}) job.submit(rank, make_unit(numbered("t", i)));
    job.submit(1, in_set(make_unit(numbered("p", i)), 1));
    job.run();
  }
  EXPECT_EQ(job.order(2).size(), 5u);  // the first two of each set, the others gather
  for (const int rank : {0, 1}) job.submit(rank, make_join());
  job.run();
  EXPECT_EQ(job.order(2).size(), 12u);
  EXPECT_EQ(job.order(2).back(), kJoinName);
  EXPECT_EQ(job.order(0).back(), kJoinName);
  EXPECT_TRUE(
      std::all_of(job[2].ran.begin() + 1, job[2].ran.end() - 1, [](const auto& ran) { return ran.unasked.front(); }));
  job.hold_completions = false;
  job.submit_everywhere(make_unit("t4"));
  job.run();
  EXPECT_TRUE(job[2].ran.back().same_bucket(job[0].ran.back()));
  job.expect_idle();
}

TEST(ControlJoin, ProcessSetsComeAndGoWhileOneHasJoined) {
  Simulation job(3, Config{});
  job.submit_everywhere(make_set("old", {0, 2}));
  job.run();
  job.submit(2, in_set(make_unit("waits"), 1));
  job.submit(2, make_join());
  job.run();
  for (const int rank : {0, 1}) {
    job.submit(rank, make_set("new", {1, 2}));
    job.submit(rank, make_removal("remove", 1));
  }
  job.run();
  ASSERT_EQ(job[2].failed.size(), 1u);
  EXPECT_EQ(job[2].failed.front().name, "waits");
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(job[rank].participant->members(1), nullptr);
    ASSERT_NE(job[rank].participant->members(2), nullptr);
    EXPECT_EQ(*job[rank].participant->members(2), (std::vector<int32_t>{1, 2}));
  }
  job[2].failed.clear();
  job.submit(1, in_set(make_unit("x"), 2));  // its only other member has joined
  job.run();
  EXPECT_EQ(job.order(1).back(), "x");
  EXPECT_EQ(job.order(2).back(), "x");
  UnitSpec barrier = make_unit("barrier");
  barrier.kind = OpKind::kBarrier;
  barrier.tensors.clear();
  for (const int rank : {0, 1}) job.submit(rank, barrier);
  job.run();
  EXPECT_EQ(job.order(2).back(), "barrier");
  for (const int rank : {0, 1}) job.submit(rank, make_join());
  job.run();
  job.expect_idle();
  EXPECT_EQ(job.order(2).back(), kJoinName);
}

// A removal completes together with what waits in the set it removes.
TEST(ControlJoin, AJoinCompletesARemovalAndWhatWaitsInItsSet) {
  for (const bool removal_first : {false, true}) {
    Simulation job(3, Config{});
    job.submit_everywhere(make_set("s", {0, 1, 2}));
    job.run();
    job.forget_results();
    for (const int rank : {0, 1}) {
      if (removal_first) job.submit(rank, make_removal("remove", 1));
      for (const char* name : {"a", "b", "c"}) job.submit(rank, in_set(make_unit(name), 1));
      if (!removal_first) job.submit(rank, make_removal("remove", 1));
      job.submit(rank, make_unit("after"));
    }
    job.submit(2, make_join());
    job.run();
    const size_t expected = removal_first ? 2 : 5;
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(job.order(rank).size(), expected);
      EXPECT_EQ(job[rank].failed.size(), removal_first && rank < 2 ? 3u : 0u);
    }
    job.submit(0, make_join());
    job.submit(1, make_join());
    job.run();
    job.expect_idle();
  }
}

TEST(ControlJoin, NobodyAccusesAJoinedRank) {
  Config config;
  config.stall_check_seconds = 10;
  config.stall_abort_seconds = 100;
  Simulation job(3, config);
  job.submit(2, make_join());
  job.run();
  job.submit(0, make_unit("x"));
  job.run();
  job.advance(std::chrono::seconds(11));
  ASSERT_EQ(job.reports.size(), 1u);
  EXPECT_NE(job.reports.front().second.find("rank 1 has not submitted 'x'"), std::string::npos);
  EXPECT_EQ(job.reports.front().second.find("rank 2 has not"), std::string::npos) << job.reports.front().second;

  job.advance(std::chrono::seconds(100));
  job.run();
  for (int rank = 0; rank < 3; ++rank) {
    ASSERT_TRUE(job[rank].fatal);
    EXPECT_EQ(job[rank].fatal->code, ErrorCode::kStalled);
    EXPECT_EQ(job[rank].fatal->rank, 1);
  }
}

// A join waits for as long as the others have work, without a word. When they do nothing any more, they are late.
TEST(ControlJoin, AJoinIsStalledOnlyWhenNothingHappens) {
  Config config;
  config.stall_check_seconds = 10;
  config.stall_abort_seconds = 25;
  Simulation job(3, config);
  job.submit(2, make_join());
  job.run();
  for (int step = 0; step < 20; ++step) {
    for (const int rank : {0, 1}) job.submit(rank, make_unit("x"));
    job.run();
    job.advance(std::chrono::seconds(9));
  }
  EXPECT_TRUE(job.reports.empty());
  job.submit(1, make_join());
  job.run();
  job.advance(std::chrono::seconds(24));
  ASSERT_EQ(job.reports.size(), 2u);
  const std::string& text = job.reports.front().second;
  EXPECT_NE(text.find("rank 0 has not submitted 'join()'; ranks 1, 2 have waited"), std::string::npos) << text;
  job.run();
  EXPECT_FALSE(job[2].fatal);
  job.advance(std::chrono::seconds(2));
  job.run();
  ASSERT_TRUE(job[2].fatal);
  EXPECT_EQ(job[2].fatal->code, ErrorCode::kStalled);
  EXPECT_EQ(job[2].fatal->rank, 0);
}

class ControlJoinLeave : public testing::TestWithParam<bool> {};

TEST_P(ControlJoinLeave, WhoeverLeavesWhileOthersHaveJoinedIsLost) {
  for (const int gone : {1, 2}) {
    Simulation job(4, Config{});
    job.submit(2, make_join());
    job.submit(3, make_join());
    job.run();
    job.leave(gone, GetParam(), "went home");
    job.run();
    for (int rank = 0; rank < 4; ++rank) {
      if (rank == gone) continue;
      ASSERT_TRUE(job[rank].fatal);
      EXPECT_EQ(job[rank].fatal->code, ErrorCode::kPeerLost);
      EXPECT_EQ(job[rank].fatal->rank, gone);
      EXPECT_NE(job[rank].fatal->message.find("join() needs it"), std::string::npos) << job[rank].fatal->message;
    }
  }
}

TEST_P(ControlJoinLeave, TheOnlyOneThatHasJoinedLeavesQuietlyUntilItIsNeeded) {
  Simulation job(3, Config{});
  job.submit(2, make_join());
  job.run();
  job.leave(2, GetParam(), "went home");
  job.run();
  EXPECT_FALSE(job[0].fatal);
  EXPECT_FALSE(job.coordinator.next_deadline());
  job.submit(0, make_unit("x"));
  job.run();
  ASSERT_TRUE(job[1].fatal);
  EXPECT_EQ(job[1].fatal->rank, 2);
}

TEST_P(ControlJoinLeave, JoiningAfterSomebodyHasLeft) {
  Simulation job(3, Config{});
  job.leave(2, GetParam(), "went home");
  job.submit(0, make_join());
  job.run();
  ASSERT_TRUE(job[0].fatal);
  EXPECT_EQ(job[0].fatal->code, ErrorCode::kPeerLost);
  EXPECT_EQ(job[0].fatal->rank, 2);
}

INSTANTIATE_TEST_SUITE_P(CleanOrNot, ControlJoinLeave, testing::Bool(),
                         [](const auto& info) { return info.param ? "Clean" : "Crash"; });

TEST(ControlJoin, TheRootTrustsNobody) {
  const auto violates = [](std::vector<UnitSpec> specs) {
    Coordinator coordinator(3, Config{});
    RequestList message;
    for (UnitSpec& spec : specs) message.requests.emplace_back().spec = std::make_unique<UnitSpec>(std::move(spec));
    coordinator.receive(1, std::move(message), TimePoint{});
    const auto response = coordinator.poll(TimePoint{});
    return response && response->fatal && response->fatal->code == ErrorCode::kInternal && response->fatal->rank == 1;
  };
  EXPECT_FALSE(violates({make_join()}));
  EXPECT_TRUE(violates({make_join(), make_unit("x")}));
  EXPECT_TRUE(violates({make_join(), make_join()}));
  EXPECT_FALSE(violates({make_adoption({0, 1})}));
  EXPECT_TRUE(violates({make_adoption({0, 2})}));
  EXPECT_TRUE(violates({make_adoption({1, 7})}));
  EXPECT_TRUE(violates({make_adoption({1, 1})}));
}

}  // namespace
}  // namespace fusewire
