// Process sets: equal ids everywhere, one global order, removal in the middle of things.
#include <algorithm>

#include "control_simulation.h"

namespace fusewire {
namespace {

using Names = std::vector<std::string>;

UnitSpec in_set(uint32_t set, const std::string& name) {
  UnitSpec spec = make_unit(name);
  spec.process_set = set;
  return spec;
}

ErrorCode refusal(Simulation& job, int rank, const UnitSpec& spec, const std::string& word) {
  try {
    job.submit(rank, spec);
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find(word), std::string::npos) << error.what();
    return error.code();
  }
  ADD_FAILURE() << "accepted " << spec.name;
  return ErrorCode::kInternal;
}

TEST(ControlProcessSets, IdsCountUpEqually) {
  Simulation job(3, Config{});
  std::vector<UnitSpec> sets = {make_set("s0", {0, 1}), make_set("s1", {1, 2}), make_set("s2", {0, 1})};
  for (int rank = 0; rank < 3; ++rank) {
    std::rotate(sets.begin(), sets.begin() + 1, sets.end());
    for (const UnitSpec& set : sets) job.submit(rank, set);
  }
  job.run();
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(job[rank].ran, job[0].ran);
    ASSERT_EQ(job[rank].ran.size(), 3u);
    for (uint32_t i = 0; i < 3; ++i) {
      const auto& ran = job[rank].ran[i];
      EXPECT_EQ(ran.created_set, i + 1);
      const auto& wanted =
          std::find_if(sets.begin(), sets.end(), [&](const UnitSpec& s) { return s.name == ran.names.front(); })->ranks;
      ASSERT_NE(job[rank].participant->members(i + 1), nullptr);
      EXPECT_EQ(*job[rank].participant->members(i + 1), wanted);
    }
  }
  EXPECT_EQ(job[0].participant->members(4), nullptr);
  EXPECT_EQ(*job[2].participant->members(0), (std::vector<int32_t>{0, 1, 2}));
}

TEST(ControlProcessSets, RefusesNonsense) {
  Simulation job(3, Config{});
  for (const std::vector<int32_t>& ranks : std::vector<std::vector<int32_t>>{{}, {1, 0}, {0, 0}, {-1}, {0, 3}}) {
    EXPECT_EQ(refusal(job, 0, make_set("s", ranks), "process set"), ErrorCode::kInvalidArgument);
  }
  EXPECT_EQ(refusal(job, 0, in_set(1, "x"), "does not exist"), ErrorCode::kInvalidArgument);
  EXPECT_EQ(refusal(job, 0, make_removal("r", 0), "global"), ErrorCode::kInvalidArgument);
  EXPECT_EQ(refusal(job, 0, make_removal("r", 5), "does not exist"), ErrorCode::kInvalidArgument);
  EXPECT_EQ(refusal(job, 0, make_unit(""), "name"), ErrorCode::kInvalidArgument);
  job.submit_everywhere(make_set("s", {0, 1}));
  job.run();
  EXPECT_EQ(refusal(job, 2, in_set(1, "x"), "not a member"), ErrorCode::kInvalidArgument);
  job.expect_idle();
}

TEST(ControlProcessSets, MembersThatDisagreeGetTheSameError) {
  Simulation job(3, Config{});
  for (int rank = 0; rank < 3; ++rank) {
    job.submit(rank, make_set("s", rank == 2 ? std::vector<int32_t>{0, 2} : std::vector<int32_t>{0, 1}));
  }
  job.run();
  for (int rank = 0; rank < 3; ++rank) {
    ASSERT_EQ(job[rank].failed.size(), 1u);
    EXPECT_EQ(job[rank].failed.front().code, ErrorCode::kTensorMismatch);
    EXPECT_NE(job[rank].failed.front().message.find("ranks 0, 1 have [0, 1], rank 2 has [0, 2]"), std::string::npos);
    EXPECT_EQ(job[rank].participant->members(1), nullptr);
  }
}

TEST(ControlProcessSets, SameNameInDifferentSetsIsNoDuplicate) {
  Simulation job(2, Config{});
  job.submit_everywhere(make_set("s", {0, 1}));
  job.run();
  for (int round = 0; round < 2; ++round) {
    job.submit_everywhere(make_unit("x", {round + 1}));
    job.submit_everywhere(in_set(1, "x"));
    job.run();
  }
  EXPECT_EQ(job.order(0).size(), 5u);
  EXPECT_EQ(job[0].ran, job[1].ran);
}

// Ranks in both of two sets run both sets' buckets in one order, whatever the order of submission.
TEST(ControlProcessSets, OverlappingSetsShareOneOrder) {
  for (unsigned seed = 0; seed < 10; ++seed) {
    Simulation job(4, Config{}, seed);
    job.lazy_root = true;
    job.submit_everywhere(make_set("left", {0, 1, 2}));
    job.run();
    job.submit_everywhere(make_set("right", {1, 2, 3}));
    job.run();
    for (int round = 0; round < 5; ++round) {
      std::vector<std::vector<UnitSpec>> left(4);
      for (int rank = 0; rank < 4; ++rank) {
        auto& specs = left[static_cast<size_t>(rank)];
        for (int i = 0; i < 6; ++i) {
          for (uint32_t set = 0; set < 3; ++set) {
            if ((set == 1 && rank == 3) || (set == 2 && rank == 0)) continue;
            specs.push_back(in_set(set, numbered("t", i)));
          }
        }
        std::shuffle(specs.begin(), specs.end(), job.random);
      }
      for (bool more = true; more;) {
        more = false;
        const size_t rank = job.random() % 4;
        for (size_t i = 0; i < 4; ++i) more = more || !left[i].empty();
        if (left[rank].empty()) continue;
        job.submit(static_cast<int>(rank), left[rank].back());
        left[rank].pop_back();
        job.some_steps(3);
      }
      job.run();
      job.expect_idle();
    }
    EXPECT_EQ(job[1].ran, job[2].ran);  // members of everything
    for (const int rank : {0, 3}) {
      std::vector<Simulation::Ran> expected;
      for (const auto& ran : job[1].ran) {
        const auto* members = job[0].participant->members(ran.process_set);
        if (std::find(members->begin(), members->end(), rank) != members->end()) expected.push_back(ran);
      }
      EXPECT_EQ(job[rank].ran, expected);
    }
  }
}

TEST(ControlProcessSets, RemovalFailsWhatWaitsAndKeepsWhatWasAgreed) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    Simulation job(3, Config{}, seed);
    job.submit_everywhere(make_set("pair", {1, 2}));
    job.run();
    for (const char* name : {"agreed", "waits", "unheard"}) {  // all cached
      for (const int rank : {1, 2}) job.submit(rank, in_set(1, name));
      job.run();
    }
    job.forget_results();
    for (const int rank : {1, 2}) job.submit(rank, in_set(1, "agreed"));
    job.submit(1, in_set(1, "waits"));
    job.run();
    for (const int rank : {1, 2}) job.submit(rank, make_removal("remove", 1));
    if (seed % 2 == 0) job.run();
    job.submit(2, in_set(1, "unheard"));
    if (seed % 3 == 0) job.send(2);
    job.submit(0, make_removal("remove", 1));
    job.run();
    EXPECT_EQ(job.order(1), (Names{"agreed", "remove"}));
    EXPECT_EQ(job.order(2), (Names{"agreed", "remove"}));
    EXPECT_EQ(job.order(0), Names{"remove"});
    ASSERT_EQ(job[1].failed.size(), 1u);
    EXPECT_EQ(job[1].failed.front().name, "waits");
    EXPECT_EQ(job[1].failed.front().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(job[1].failed.front().message.find("process set 1 was removed"), std::string::npos);
    ASSERT_EQ(job[2].failed.size(), 1u);
    EXPECT_EQ(job[2].failed.front().name, "unheard");
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_FALSE(job[rank].fatal) << job[rank].fatal->message;
      EXPECT_EQ(job[rank].participant->members(1), nullptr);
    }
    EXPECT_EQ(refusal(job, 1, in_set(1, "x"), "has been removed"), ErrorCode::kInvalidArgument);
    job.expect_idle();

    // The id is not given again.
    job.submit_everywhere(make_set("again", {1, 2}));
    job.run();
    EXPECT_EQ(job[0].ran.back().created_set, 2u);
  }
}

TEST(ControlProcessSets, GatheredUnitsRunBeforeTheRemoval) {
  Simulation job(2, Config{});
  job.hold_completions = true;
  job.submit_everywhere(make_set("s", {0, 1}));
  job.run();
  for (const char* name : {"a", "b", "c", "d"}) {
    job.submit_everywhere(in_set(1, name));
    job.run();
  }
  EXPECT_EQ(job.order(0), (Names{"s", "a", "b"}));
  job.submit_everywhere(make_removal("remove", 1));
  job.run();
  EXPECT_EQ(job.order(0), (Names{"s", "a", "b", "c", "d", "remove"}));
  EXPECT_EQ(job[0].running.size(), 3u);
  job.hold_completions = false;
  job.run();
  job.expect_idle();
}

TEST(ControlProcessSets, TwoRemovalsOfOneSet) {
  Simulation job(2, Config{});
  job.submit_everywhere(make_set("s", {0, 1}));
  job.run();
  job.submit_everywhere(make_removal("first", 1));
  job.submit_everywhere(make_removal("second", 1));
  job.run();
  EXPECT_EQ(job.order(0), (Names{"s", "first"}));
  ASSERT_EQ(job[0].failed.size(), 1u);
  EXPECT_EQ(job[0].failed.front().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(job[0].failed, job[1].failed);
  job.expect_idle();
}

// Told of a set without having asked: every rank, and with the same number.
TEST(ControlProcessSets, AdoptedByItsMembersAlone) {
  Simulation job(4, Config{});
  for (const int rank : {1, 3}) job.submit(rank, make_adoption({1, 3}));
  job.run();
  for (int rank = 0; rank < 4; ++rank) {
    ASSERT_EQ(job[rank].ran.size(), 1u);
    EXPECT_EQ(job[rank].ran.front().created_set, 1u);
    EXPECT_EQ(job[rank].ran.front().unasked.front(), rank % 2 == 0);
    ASSERT_NE(job[rank].participant->members(1), nullptr);
    EXPECT_EQ(*job[rank].participant->members(1), (std::vector<int32_t>{1, 3}));
  }
  for (const int rank : {1, 3}) job.submit(rank, in_set(1, "x"));
  job.run();
  EXPECT_EQ(job.order(3).back(), "x");
  EXPECT_EQ(job[0].ran.size(), 1u);
  job.expect_idle();
}

TEST(ControlProcessSets, AdoptingFindsTheFirstSetWithTheseRanks) {
  Simulation job(3, Config{});
  const auto adopt = [&](std::vector<int32_t> ranks) {
    for (const int32_t rank : ranks) job.submit(rank, make_adoption(ranks));
    job.run();
    for (int rank = 1; rank < 3; ++rank) EXPECT_TRUE(job[rank].ran.back().same_bucket(job[0].ran.back()));
    job.expect_idle();
    return job[0].ran.back().created_set;
  };
  const auto everywhere = [&](const UnitSpec& spec) {
    job.submit_everywhere(spec);
    job.run();
  };
  everywhere(make_set("s1", {0, 1}));
  everywhere(make_set("s2", {0, 1}));
  EXPECT_EQ(adopt({0, 1}), 1u);
  EXPECT_EQ(adopt({0, 1, 2}), 0u);
  EXPECT_EQ(adopt({2}), 3u);
  EXPECT_EQ(adopt({2}), 3u);
  everywhere(make_removal("r1", 1));
  EXPECT_EQ(adopt({0, 1}), 2u);
  everywhere(make_removal("r2", 2));
  EXPECT_EQ(adopt({0, 1}), 4u);  // an id is never given again
  EXPECT_EQ(adopt({2}), 3u);
}

// Two groups that adopt at the same time, and ranks in both that do it in any order.
TEST(ControlProcessSets, GroupsAdoptInAnyOrder) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    Simulation job(4, Config{}, seed);
    job.lazy_root = true;
    std::vector<std::pair<int, std::vector<int32_t>>> calls;
    for (const std::vector<int32_t>& ranks : std::vector<std::vector<int32_t>>{{0, 1}, {2, 3}, {1, 2}, {0, 1, 2}}) {
      for (const int32_t rank : ranks) calls.emplace_back(rank, ranks);
    }
    std::shuffle(calls.begin(), calls.end(), job.random);
    for (const auto& [rank, ranks] : calls) {
      job.submit(rank, make_adoption(ranks));
      job.some_steps(3);
    }
    job.run();
    job.expect_idle();
    for (int rank = 0; rank < 4; ++rank) {
      ASSERT_EQ(job[rank].ran.size(), 4u);
      for (size_t i = 0; i < 4; ++i) EXPECT_TRUE(job[rank].ran[i].same_bucket(job[0].ran[i]));
      for (uint32_t set = 1; set < 5; ++set) {
        ASSERT_NE(job[rank].participant->members(set), nullptr);
        EXPECT_EQ(*job[rank].participant->members(set), *job[0].participant->members(set));
      }
    }
  }
}

TEST(ControlProcessSets, AnAdoptionAndARemovalCross) {
  for (unsigned seed = 0; seed < 30; ++seed) {
    Simulation job(3, Config{}, seed);
    job.lazy_root = true;
    job.submit_everywhere(make_set("s", {0, 1}));
    job.run();
    for (int rank = 0; rank < 3; ++rank) {
      std::vector<UnitSpec> calls = {make_removal("remove", 1)};
      if (rank < 2) calls.push_back(make_adoption({0, 1}));
      std::shuffle(calls.begin(), calls.end(), job.random);
      for (const UnitSpec& call : calls) {
        job.submit(rank, call);
        job.some_steps(4);
      }
    }
    job.run();
    job.expect_idle();
    for (int rank = 0; rank < 3; ++rank) {
      ASSERT_EQ(job[rank].ran.size(), 3u);
      for (size_t i = 0; i < 3; ++i) EXPECT_TRUE(job[rank].ran[i].same_bucket(job[0].ran[i]));
      const bool removed_first = job.order(0)[1] == "remove";
      EXPECT_EQ(job[rank].ran[removed_first ? 2 : 1].created_set, removed_first ? 2u : 1u);
      EXPECT_EQ(job[rank].participant->members(1), nullptr);
      EXPECT_EQ(job[rank].participant->members(2) != nullptr, removed_first);
    }
  }
}

TEST(ControlProcessSets, AnAdoptionThatMakesNoSense) {
  Simulation job(3, Config{});
  EXPECT_EQ(refusal(job, 0, make_adoption({1, 2}), "not a member"), ErrorCode::kInvalidArgument);
  EXPECT_EQ(refusal(job, 0, make_adoption({}), "at least one rank"), ErrorCode::kInvalidArgument);
  EXPECT_EQ(refusal(job, 0, make_adoption({0, 3}), "from 0 to 2"), ErrorCode::kInvalidArgument);
  UnitSpec renamed = make_adoption({0, 1});
  renamed.name = "mine";
  EXPECT_EQ(refusal(job, 0, renamed, "name"), ErrorCode::kInvalidArgument);
  EXPECT_EQ(refusal(job, 0, make_unit(adoption_name({0, 1})), "reserved"), ErrorCode::kInvalidArgument);
  job.expect_idle();
}

TEST(ControlProcessSets, AnAdoptionNeedsItsMembersOnly) {
  Config config;
  config.stall_check_seconds = 10;
  Simulation job(4, config);
  job.leave(3, true, "done");
  job.submit(0, make_adoption({0, 1}));
  job.run();
  job.advance(std::chrono::seconds(11));
  ASSERT_EQ(job.reports.size(), 1u);
  EXPECT_NE(job.reports.front().second.find("rank 1 has not submitted"), std::string::npos);
  EXPECT_EQ(job.reports.front().second.find("rank 2"), std::string::npos);
  job.submit(1, make_adoption({0, 1}));
  job.run();
  for (int rank = 0; rank < 3; ++rank) EXPECT_NE(job[rank].participant->members(1), nullptr);
  job.expect_idle();
  job.submit(0, make_adoption({0, 3}));
  job.run();
  ASSERT_TRUE(job[0].fatal);
  EXPECT_EQ(job[0].fatal->code, ErrorCode::kPeerLost);
  EXPECT_EQ(job[0].fatal->rank, 3);
}

TEST(ControlProcessSets, AMemberThatHasJoinedIsAdoptedAlong) {
  Simulation job(4, Config{});
  job.submit(1, make_join());
  job.submit(3, make_join());
  job.run();
  job.submit(0, make_adoption({0, 1}));
  job.run();
  for (int rank = 0; rank < 4; ++rank) EXPECT_NE(job[rank].participant->members(1), nullptr);
  job.submit(0, in_set(1, "x"));
  job.run();
  EXPECT_EQ(job.order(1).back(), "x");
  for (const int rank : {0, 2}) job.submit(rank, make_join());
  job.run();
  job.expect_idle();
}

}  // namespace
}  // namespace fusewire
