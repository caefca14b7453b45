// Ranks submit in any order; every one of them runs the same units in the same order.
#include <algorithm>
#include <numeric>
#include <set>

#include "control_simulation.h"

namespace fusewire {
namespace {

using Names = std::vector<std::string>;

TEST(ControlOrder, AnyOrderOnFourRanksOverFiftyRounds) {
  Simulation job(4, Config{}, 7);
  std::vector<UnitSpec> units;
  for (int i = 0; i < 100; ++i) units.push_back(make_unit(numbered("t", i), {i + 1}));
  for (int round = 0; round < 50; ++round) {
    std::vector<Names> left(4);
    for (Names& names : left) {
      for (const UnitSpec& unit : units) names.push_back(unit.name);
      std::shuffle(names.begin(), names.end(), job.random);
    }
    for (int submitted = 0; submitted < 400;) {
      const int rank = static_cast<int>(job.random() % 4);
      Names& names = left[static_cast<size_t>(rank)];
      if (names.empty()) continue;
      job.submit(rank, units[static_cast<size_t>(std::stoi(names.back().substr(1)))]);
      names.pop_back();
      ++submitted;
      job.some_steps(2);
    }
    job.run();
    job.expect_idle();
    Names sorted = job.order(0);
    ASSERT_EQ(sorted.size(), 100u);
    std::sort(sorted.begin(), sorted.end());
    EXPECT_EQ(std::unique(sorted.begin(), sorted.end()), sorted.end());
    for (int rank = 1; rank < 4; ++rank) EXPECT_EQ(job[rank].ran, job[0].ran);
    for (int rank = 0; rank < 4; ++rank) {
      EXPECT_EQ(job[rank].full_requests, round == 0 ? 100u : 0u);
      EXPECT_TRUE(job[rank].failed.empty());
    }
    job.forget_results();
  }
}

TEST(ControlOrder, OneRankAlone) {
  Simulation job(1, Config{});
  for (int round = 0; round < 3; ++round) {
    job.submit(0, make_unit("x"));
    job.run();
  }
  EXPECT_EQ(job.order(0), (Names{"x", "x", "x"}));
  job.expect_idle();
}

TEST(ControlOrder, ZeroSizedAndZeroDimensionalTensors) {
  Simulation job(2, Config{});
  job.submit_everywhere(make_unit("empty", {0, 5}));
  job.submit_everywhere(make_unit("scalar", {}));
  UnitSpec nothing = make_unit("nothing");
  nothing.tensors.clear();
  job.submit_everywhere(nothing);
  job.run();
  EXPECT_EQ(job.order(0).size(), 3u);
  EXPECT_EQ(job[0].ran, job[1].ran);
  job.expect_idle();
}

TEST(ControlOrder, BarriersAndBroadcasts) {
  Simulation job(3, Config{});
  UnitSpec barrier;
  barrier.kind = OpKind::kBarrier;
  barrier.name = "wait";
  UnitSpec broadcast = make_unit("weights");
  broadcast.kind = OpKind::kBroadcast;
  broadcast.root = 2;
  job.submit(0, barrier);
  job.submit(1, barrier);
  job.submit_everywhere(broadcast);
  job.run();
  EXPECT_EQ(job.order(0), Names{"weights"});
  job.submit(2, barrier);
  job.run();
  EXPECT_EQ(job.order(1), (Names{"weights", "wait"}));
  job.expect_idle();

  broadcast.root = 3;
  EXPECT_THROW(job.submit(0, broadcast), Error);
}

TEST(ControlOrder, DuplicateNameRaisesAndTheFirstCompletes) {
  Simulation job(2, Config{});
  job.submit(0, make_unit("x"));
  try {
    job.submit(0, make_unit("x"));
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kDuplicateName);
    EXPECT_NE(std::string(error.what()).find("'x'"), std::string::npos);
  }
  job.run();
  EXPECT_TRUE(job[0].ran.empty());
  job.submit(1, make_unit("x"));
  job.run();
  EXPECT_EQ(job.order(0), Names{"x"});
  job.submit_everywhere(make_unit("x"));
  job.run();
  EXPECT_EQ(job.order(1), (Names{"x", "x"}));
}

TEST(ControlOrder, FourThousandRanks) {
  constexpr int kRanks = 4096;
  Simulation job(kRanks, Config{});
  std::vector<int> order(kRanks);
  std::iota(order.begin(), order.end(), 0);
  for (int round = 0; round < 3; ++round) {
    std::shuffle(order.begin(), order.end(), job.random);
    for (const int rank : order) {
      for (int i = 0; i < 5; ++i) job.submit(rank, make_unit(numbered("t", (i + rank) % 5)));
      job.send(rank);
      job.deliver_up(rank);
    }
    for (const int rank : order) {
      while (!job[rank].down.empty()) job.deliver_down(rank);
    }
    while (!job[0].running.empty()) job.complete(0);
  }
  EXPECT_EQ(job.order(0).size(), 15u);
  for (const int rank : order) ASSERT_EQ(job[rank].ran, job[0].ran);
  EXPECT_EQ(job[kRanks - 1].full_requests, 5u);
  job.send(0);
  job.deliver_up(0);
  job.expect_idle();
}

}  // namespace
}  // namespace fusewire
