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

}  // namespace
}  // namespace fusewire
