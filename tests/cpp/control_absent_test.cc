// Absent entries: a rank that has nothing to contribute answers all the same.
#include "control_simulation.h"

namespace fusewire {
namespace {

using Bits = std::vector<bool>;

TEST(ControlAbsent, OnSomeRanksTheUnitRuns) {
  Simulation job(3, Config{});
  for (int round = 0; round < 3; ++round) {
    job.submit(0, make_unit("b"));
    job.submit(1, make_unit("b"), {true});
    job.submit(2, make_unit("b"), {round == 1});
    job.run();
  }
  for (int rank = 0; rank < 3; ++rank) {
    ASSERT_EQ(job[rank].ran.size(), 3u);
    for (const auto& ran : job[rank].ran) {
      EXPECT_FALSE(ran.skip);
      EXPECT_TRUE(ran.skipped.front().empty());
    }
    EXPECT_EQ(job[rank].full_requests, 1u);
    EXPECT_EQ(job[rank].id_requests, 2u);
  }
  job.expect_idle();
}

TEST(ControlAbsent, OnAllRanksTheUnitIsSkipped) {
  Simulation job(3, Config{});
  job.hold_completions = true;  // a skip is no data in flight
  for (int round = 0; round < 4; ++round) {
    job.submit_everywhere(make_unit("b"), {true});
    job.submit_everywhere(make_group("g", 2), {true, true});
    job.run();
  }
  for (int rank = 0; rank < 3; ++rank) {
    size_t units = 0;
    for (const auto& ran : job[rank].ran) {
      EXPECT_TRUE(ran.skip);
      units += ran.names.size();
    }
    EXPECT_EQ(units, 8u);
    EXPECT_TRUE(job[rank].running.empty());
  }
  job.expect_idle();
}

TEST(ControlAbsent, GroupsCarryABitPerTensor) {
  Simulation job(3, Config{});
  for (int round = 0; round < 2; ++round) {
    job.submit(0, make_group("g", 4), {true, true, false, false});
    job.submit(1, make_group("g", 4), {true, false, true, false});
    job.submit(2, make_group("g", 4), {true, true, true, false});
    job.submit_everywhere(make_unit("after"));
    job.run();
  }
  for (int rank = 0; rank < 3; ++rank) {
    size_t groups = 0;
    for (const auto& ran : job[rank].ran) {
      EXPECT_FALSE(ran.skip);
      for (size_t i = 0; i < ran.names.size(); ++i) {
        if (ran.names[i] != "g") {
          EXPECT_TRUE(ran.skipped[i].empty());
          continue;
        }
        ++groups;
        EXPECT_EQ(ran.skipped[i], (Bits{true, false, false, false}));
      }
    }
    EXPECT_EQ(groups, 2u);
  }
}

TEST(ControlAbsent, AGroupThatOneRankHasInFullSkipsNothing) {
  for (unsigned seed = 0; seed < 6; ++seed) {
    Simulation job(3, Config{}, seed);
    job.submit(0, make_group("g", 2), {true, true});
    job.submit(1, make_group("g", 2));
    job.submit(2, make_group("g", 2), {false, true});
    job.run();
    ASSERT_EQ(job[0].ran.size(), 1u);
    EXPECT_FALSE(job[0].ran.front().skip);
    EXPECT_TRUE(job[0].ran.front().skipped.front().empty());
  }
}

TEST(ControlAbsent, SkippedAndPresentUnitsDoNotShareABucket) {
  Simulation job(2, Config{});
  job.lazy_root = true;
  job.submit_everywhere(make_unit("a"));
  job.submit_everywhere(make_unit("b"), {true});
  job.submit_everywhere(make_unit("c"));
  job.run();
  for (const auto& ran : job[0].ran) {
    for (const std::string& name : ran.names) EXPECT_EQ(ran.skip, name == "b");
  }
  EXPECT_EQ(job[0].ran, job[1].ran);
  EXPECT_EQ(job.order(0).size(), 3u);
}

TEST(ControlAbsent, AnAbsentRankIsHeldToTheDescription) {
  Simulation job(2, Config{});
  job.submit(0, make_unit("b", {3}));
  job.submit(1, make_unit("b", {4}), {true});
  job.run();
  ASSERT_EQ(job[0].failed.size(), 1u);
  EXPECT_EQ(job[0].failed, job[1].failed);
  EXPECT_THROW(job.submit(0, make_group("b", 2), {true}), Error);  // bits that do not fit
  job.expect_idle();
}

}  // namespace
}  // namespace fusewire
