// Ranks that disagree: the same error everywhere, who said what, and the name works afterwards.
#include <algorithm>
#include <functional>
#include <ostream>

#include "control/rank_set.h"
#include "control_simulation.h"

namespace fusewire {
namespace {

struct Disagreement {
  const char* field;
  std::function<void(UnitSpec&)> change;
  const char* values;  // rank 1 is the odd one out
};
std::ostream& operator<<(std::ostream& out, const Disagreement& d) { return out << d.field; }

class ControlMismatch : public testing::TestWithParam<Disagreement> {};

UnitSpec base_unit() {
  UnitSpec spec = make_unit("x", {2, 3});
  spec.tensors.push_back(spec.tensors.front());
  return spec;
}

TEST_P(ControlMismatch, SameErrorEverywhereAndTheNameWorksAgain) {
  for (const bool warm : {false, true}) {
    for (unsigned seed = 0; seed < 6; ++seed) {
      Simulation job(3, Config{}, seed);
      if (warm) {
        job.submit_everywhere(base_unit());
        job.run();
        job.forget_results();
      }
      UnitSpec other = base_unit();
      GetParam().change(other);
      std::vector<int> order = {0, 1, 2};
      std::shuffle(order.begin(), order.end(), job.random);
      for (const int rank : order) {
        job.submit(rank, rank == 1 ? other : base_unit());
        job.some_steps(4);
      }
      job.run();
      ASSERT_EQ(job[0].failed.size(), 1u);
      for (int rank = 1; rank < 3; ++rank) EXPECT_EQ(job[rank].failed, job[0].failed);
      const Simulation::Failed& failed = job[0].failed.front();
      EXPECT_EQ(failed.code, ErrorCode::kTensorMismatch);
      EXPECT_EQ(failed.name, "x");
      EXPECT_NE(failed.message.find("'x'"), std::string::npos) << failed.message;
      EXPECT_NE(failed.message.find(std::string(GetParam().field) + " differs: " + GetParam().values),
                std::string::npos)
          << failed.message;
      EXPECT_TRUE(job[0].ran.empty());
      job.expect_idle();

      for (const UnitSpec& again : {base_unit(), other, base_unit()}) {
        job.submit_everywhere(again);
        job.run();
      }
      for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(job[rank].ran.size(), 3u);
      job.expect_idle();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Fields, ControlMismatch,
    testing::Values(
        Disagreement{"operation", [](UnitSpec& s) { s.kind = OpKind::kBroadcast; },
                     "ranks 0, 2 have allreduce, rank 1 has broadcast"},
        Disagreement{"op", [](UnitSpec& s) { s.op = ReduceOp::kMax; }, "ranks 0, 2 have Sum, rank 1 has Max"},
        Disagreement{"root", [](UnitSpec& s) { s.root = 2; }, "ranks 0, 2 have 0, rank 1 has 2"},
        Disagreement{"prescale factor", [](UnitSpec& s) { s.prescale = 0.25; }, "ranks 0, 2 have 1, rank 1 has 0.25"},
        Disagreement{"postscale factor", [](UnitSpec& s) { s.postscale = 1e-30; },
                     "ranks 0, 2 have 1, rank 1 has 1e-30"},
        Disagreement{"number of tensors", [](UnitSpec& s) { s.tensors.pop_back(); }, "ranks 0, 2 have 2, rank 1 has 1"},
        Disagreement{"dtype", [](UnitSpec& s) { s.tensors[1].dtype = s.tensors[1].wire = DataType::kFloat64; },
                     "ranks 0, 2 have float32, rank 1 has float64"},
        Disagreement{"compressed dtype", [](UnitSpec& s) { s.tensors[0].wire = DataType::kFloat16; },
                     "ranks 0, 2 have float32, rank 1 has float16"},
        Disagreement{"device", [](UnitSpec& s) { s.tensors[1].device = DeviceType::kCuda; },
                     "ranks 0, 2 have cpu, rank 1 has cuda"},
        Disagreement{"shape", [](UnitSpec& s) { s.tensors[1].shape = {3, 2}; },
                     "ranks 0, 2 have [2, 3], rank 1 has [3, 2]"}),
    [](const auto& info) {
      std::string name = info.param.field;
      std::replace(name.begin(), name.end(), ' ', '_');
      return name;
    });

TEST(ControlMismatchText, NamesOpRanksAndValues) {
  Simulation job(3, Config{});
  job.submit(0, make_unit("x", {2, 3}));
  job.submit(1, make_unit("x", {3, 2}));
  job.submit(2, make_unit("x", {3, 2}));
  job.run();
  ASSERT_EQ(job[2].failed.size(), 1u);
  EXPECT_EQ(
      job[2].failed.front().message.find("allreduce 'x': shape differs: rank 0 has [2, 3], ranks 1, 2 have [3, 2]"), 0u)
      << job[2].failed.front().message;
}

TEST(ControlMismatchText, TellsTheTensorOfAGroupAndEveryOpinion) {
  Simulation job(4, Config{});
  for (int rank = 0; rank < 4; ++rank) {
    UnitSpec spec = make_group("layers", 3);
    spec.tensors[2].shape = {rank % 3};
    job.submit(rank, spec);
  }
  job.run();
  ASSERT_EQ(job[1].failed.size(), 1u);
  EXPECT_NE(job[1].failed.front().message.find("ranks 0, 3 have [0], rank 1 has [1], rank 2 has [2]"),
            std::string::npos)
      << job[1].failed.front().message;
  EXPECT_NE(job[1].failed.front().message.find("tensor 2 of 3"), std::string::npos);
}

TEST(ControlMismatchText, RankListsStayShort) {
  EXPECT_EQ(rank_list({4}), "rank 4");
  EXPECT_EQ(rank_list({1, 2}), "ranks 1, 2");
  EXPECT_EQ(rank_list({0, 1, 2, 7}), "ranks 0-2, 7");
  std::vector<int> even;
  for (int rank = 0; rank < 200; rank += 2) even.push_back(rank);
  EXPECT_EQ(rank_list(even), "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22 and 88 more");
}

// The members that never came are told, too, when they come at last.
TEST(ControlMismatchLate, AnsweredWhenTheStallTimeIsOver) {
  for (const bool crossing : {false, true}) {
    Config config;
    config.stall_abort_seconds = 10;
    config.stall_check_seconds = 0;
    Simulation job(4, config);
    job.submit(0, make_unit("x", {2}));
    job.submit(1, make_unit("x", {3}));
    job.run();
    if (crossing) {
      job.submit(2, make_unit("x", {2}));
      job.send(2);  // on its way when the root gives up waiting
    }
    job.advance(std::chrono::seconds(9));
    job.run_without(2);
    EXPECT_TRUE(job[0].failed.empty());
    job.advance(std::chrono::seconds(1));
    job.run();
    for (const int rank : {0, 1}) {
      ASSERT_EQ(job[rank].failed.size(), 1u);
      EXPECT_EQ(job[rank].failed.front().code, ErrorCode::kTensorMismatch);
      EXPECT_FALSE(job[rank].fatal);
    }
    EXPECT_NE(job[0].failed.front().message.find("ranks 2, 3 had not submitted it"), std::string::npos)
        << job[0].failed.front().message;

    std::vector<int> late = {3};
    if (crossing) {
      EXPECT_EQ(job[2].failed, job[0].failed);
    } else {
      late.push_back(2);
    }
    for (const int rank : late) {
      try {
        job.submit(rank, make_unit("x", {2}));
        FAIL() << "rank " << rank << " was not told";
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::kTensorMismatch);
        EXPECT_EQ(error.what(), job[0].failed.front().message);
      }
    }
    job.expect_idle();
    job.submit_everywhere(make_unit("x", {5}));
    job.run();
    for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(job.order(rank), std::vector<std::string>{"x"});
    job.expect_idle();
  }
}

// A submission that has not even been sent when its error arrives must not turn up at the root afterwards.
TEST(ControlMismatchLate, AnUnsentSubmissionIsWithdrawn) {
  Config config;
  config.stall_abort_seconds = 10;
  Simulation job(3, config);
  job.submit(0, make_unit("x", {2}));
  job.submit(1, make_unit("x", {3}));
  job.run();
  job.submit(2, make_unit("x", {2}));
  job.submit(2, make_unit("y"));
  job.advance(std::chrono::seconds(10));
  while (!job[2].down.empty()) job.deliver_down(2);
  ASSERT_EQ(job[2].failed.size(), 1u);
  job.run();
  EXPECT_EQ(job[2].full_requests, 1u);
  job.submit(0, make_unit("y"));
  job.submit(1, make_unit("y"));
  job.run();
  EXPECT_EQ(job.order(2), std::vector<std::string>{"y"});
  job.expect_idle();
}

}  // namespace
}  // namespace fusewire
