// Ranks that go: nobody idle is disturbed, everybody who needs them is told.
#include "control_simulation.h"

namespace fusewire {
namespace {

class ControlLeave : public testing::TestWithParam<bool> {};  // clean or not

void expect_lost(Simulation& job, int rank, int gone, const std::string& reason, const std::string& name) {
  ASSERT_TRUE(job[rank].fatal) << "rank " << rank;
  EXPECT_EQ(job[rank].fatal->code, ErrorCode::kPeerLost);
  EXPECT_EQ(job[rank].fatal->rank, gone);
  const std::string& text = job[rank].fatal->message;
  EXPECT_NE(text.find(numbered("rank ", gone)), std::string::npos) << text;
  EXPECT_NE(text.find(reason), std::string::npos) << text;
  EXPECT_NE(text.find(name), std::string::npos) << text;
}

TEST_P(ControlLeave, IdlePeersAreNotDisturbedTheNextToNeedItIsTold) {
  Simulation job(3, Config{});
  job.submit_everywhere(make_unit("x"));
  job.run();
  job.leave(2, GetParam(), "ran out of batteries");
  job.run();
  EXPECT_FALSE(job[0].fatal);
  EXPECT_FALSE(job[1].fatal);
  job.expect_idle();

  job.submit(0, make_unit("x"));
  job.run();
  for (const int rank : {0, 1}) expect_lost(job, rank, 2, "ran out of batteries", "'x'");

  // And so is everyone who asks later.
  for (const int rank : {0, 1}) job[rank].fatal.reset();
  job.submit(1, make_unit("y"));
  job.run();
  for (const int rank : {0, 1}) expect_lost(job, rank, 2, "ran out of batteries", "'x'");
}

TEST_P(ControlLeave, WaitingPeersAreToldAtOnce) {
  Simulation job(3, Config{});
  job.submit(0, make_unit("x"));
  job.run();
  job.leave(2, GetParam(), "ValueError: bad batch");
  job.run();
  for (const int rank : {0, 1}) expect_lost(job, rank, 2, "ValueError: bad batch", "'x'");
  EXPECT_EQ(job[0].participant->take_pending().size(), 1u);
  EXPECT_FALSE(job.coordinator.next_deadline());
}

TEST_P(ControlLeave, WhatOnlyItHadSubmittedKeepsNobodyWaiting) {
  Simulation job(3, Config{});
  job.submit(2, make_unit("x"));
  job.run();
  job.leave(2, GetParam(), "bye");
  job.run();
  EXPECT_FALSE(job[0].fatal);
  EXPECT_FALSE(job.coordinator.next_deadline());
  job.submit(1, make_unit("x"));
  job.run();
  expect_lost(job, 0, 2, "bye", "'x'");
}

TEST_P(ControlLeave, GatheredUnitsNeedIt) {
  Simulation job(2, Config{});
  job.hold_completions = true;
  for (int i = 0; i < 3; ++i) {
    job.submit_everywhere(make_unit(numbered("t", i)));
    job.run();
  }
  EXPECT_EQ(job[0].ran.size(), 2u);
  job.leave(1, GetParam(), "bye");
  job.run();
  expect_lost(job, 0, 1, "bye", "'t2'");
}

TEST_P(ControlLeave, SaidTwiceMeansOnce) {
  Simulation job(2, Config{});
  job.leave(1, GetParam(), "first");
  job.coordinator.leave(1, !GetParam(), "second", job.now);
  job.submit(0, make_unit("x"));
  job.run();
  expect_lost(job, 0, 1, "first", "'x'");
}

INSTANTIATE_TEST_SUITE_P(CleanOrNot, ControlLeave, testing::Bool(),
                         [](const auto& info) { return info.param ? "Clean" : "Crash"; });

TEST(ControlLeaveSets, OtherSetsGoOnAfterACleanLeave) {
  Simulation job(4, Config{});
  job.submit_everywhere(make_set("pair", {1, 2}));
  job.run();
  job.leave(3, true, "done");
  for (int round = 0; round < 5; ++round) {
    UnitSpec spec = make_unit(numbered("t", round % 2));
    spec.process_set = 1;
    job.submit(1, spec);
    job.submit(2, spec);
    job.run();
  }
  EXPECT_EQ(job.order(1).size(), 6u);
  EXPECT_EQ(job.order(2).size(), 6u);
  for (int rank = 0; rank < 3; ++rank) EXPECT_FALSE(job[rank].fatal);
  job.submit(0, make_set("another", {0}));  // needs everybody
  job.run();
  expect_lost(job, 0, 3, "done", "'another'");
}

TEST(ControlLeaveSets, ACleanLeaveDoesNotTouchWhatOthersWaitFor) {
  Simulation job(4, Config{});
  job.submit_everywhere(make_set("pair", {1, 2}));
  job.run();
  UnitSpec spec = make_unit("x");
  spec.process_set = 1;
  job.submit(1, spec);
  job.run();
  job.leave(3, true, "done");
  job.run();
  EXPECT_FALSE(job[1].fatal);
  job.submit(2, spec);
  job.run();
  EXPECT_EQ(job.order(1).back(), "x");
}

TEST(ControlLeaveSets, ACrashWhileAnythingGoesOnFailsTheJob) {
  Simulation job(4, Config{});
  job.submit_everywhere(make_set("pair", {1, 2}));
  job.run();
  UnitSpec spec = make_unit("x");
  spec.process_set = 1;
  job.submit(1, spec);
  job.run();
  job.leave(3, false, "connection closed (killed?)");
  job.run();
  for (int rank = 0; rank < 3; ++rank) expect_lost(job, rank, 3, "killed?", "rank 3 was lost");
}

TEST(ControlLeaveSets, ACrashDuringABucketFailsTheJob) {
  Simulation job(3, Config{});
  job.hold_completions = true;
  job.submit_everywhere(make_unit("x"));
  job.run();
  job.leave(1, false, "connection closed (killed?)");
  job.run();
  for (const int rank : {0, 2}) expect_lost(job, rank, 1, "killed?", "rank 1");
}

TEST(ControlFailure, OneRanksFailureIsEverybodysError) {
  Simulation job(3, Config{});
  job.submit(0, make_unit("x"));
  job[1].participant->report_failure({0, "", ErrorCode::kCollective, 1, "the data plane of rank 1 failed"});
  job.run();
  for (int rank = 0; rank < 3; ++rank) {
    ASSERT_TRUE(job[rank].fatal);
    EXPECT_EQ(job[rank].fatal->code, ErrorCode::kCollective);
    EXPECT_EQ(job[rank].fatal->rank, 1);
    EXPECT_EQ(job[rank].fatal->message, "the data plane of rank 1 failed");
  }
}

// The usual end of a job: all have run the last bucket, and one is gone before the root hears that it is complete.
TEST(ControlLeaveSets, ACleanLeaveAfterTheLastBucketIsQuiet) {
  Simulation job(3, Config{});
  job.hold_completions = true;
  job.submit_everywhere(make_unit("x"));
  job.run();
  job.leave(2, true, "shutdown");
  job.leave(1, true, "shutdown");
  job.hold_completions = false;
  job.run();
  EXPECT_FALSE(job[0].fatal);
  job.expect_idle();
}

}  // namespace
}  // namespace fusewire
