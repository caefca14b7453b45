// Which units share a bucket, and when buckets start: Note [Group commit].
#include <algorithm>

#include "control_simulation.h"

namespace fusewire {
namespace {

using Names = std::vector<std::string>;

Config threshold(int64_t bytes) {
  Config config;
  config.fusion_threshold = bytes;
  return config;
}

// Two ranks, no completion unless a test gives it.
class ControlFusion : public testing::Test {
 protected:
  static std::vector<Names> buckets(Simulation& job, int rank = 0) {
    std::vector<Names> result;
    for (const auto& ran : job[rank].ran) result.push_back(ran.names);
    return result;
  }
  static void submit(Simulation& job, const UnitSpec& spec) {
    job.submit_everywhere(spec);
    job.run();
  }
  // Everything is submitted before the root hears of it, in this order.
  static void submit_together(Simulation& job, const std::vector<UnitSpec>& specs) {
    for (const UnitSpec& spec : specs) job.submit_everywhere(spec);
    job.run();
  }
  static UnitSpec floats(const std::string& name, int64_t count) { return make_unit(name, {count}); }
  static UnitSpec doubles(const std::string& name, int64_t count) {
    return make_unit(name, {count}, DataType::kFloat64);
  }
  static std::unique_ptr<Simulation> held(int size, const Config& config) {
    auto job = std::make_unique<Simulation>(size, config);
    job->hold_completions = true;
    return job;
  }
  static void complete_one(Simulation& job, int rank = 0) {
    job.complete(rank);
    job.run();
  }
};

TEST_F(ControlFusion, GathersWhileTwoBucketsAreInFlight) {
  const auto job = held(2, Config{});
  for (const char* name : {"a", "b", "c", "d", "e"}) submit(*job, floats(name, 4));
  EXPECT_EQ(buckets(*job), (std::vector<Names>{{"a"}, {"b"}}));
  complete_one(*job);
  EXPECT_EQ(buckets(*job), (std::vector<Names>{{"a"}, {"b"}, {"c", "d", "e"}}));
  submit(*job, floats("f", 4));
  EXPECT_EQ(buckets(*job).size(), 3u);
  complete_one(*job);
  EXPECT_EQ(buckets(*job).back(), Names{"f"});
  while (!(*job)[0].running.empty()) complete_one(*job);
  job->expect_idle();
  EXPECT_EQ(buckets(*job, 0), buckets(*job, 1));
  EXPECT_TRUE((*job)[1].running.empty());  // only the first member reports
}

TEST_F(ControlFusion, WhatIsReadyAtOnceStartsTogether) {
  Simulation job(2, Config{});
  submit_together(job, {floats("a", 1), doubles("b", 1), floats("c", 0), doubles("d", 1), floats("e", 1)});
  EXPECT_EQ(buckets(job), (std::vector<Names>{{"a", "c", "e"}, {"b", "d"}}));
}

TEST_F(ControlFusion, DifferentKeysGatherSideBySide) {
  const auto job = held(2, Config{});
  submit(*job, floats("x", 1));
  submit(*job, doubles("y", 1));
  UnitSpec max = floats("max", 1);
  max.op = ReduceOp::kMax;
  UnitSpec scaled = floats("scaled", 1);
  scaled.prescale = 0.5;
  UnitSpec half = floats("half", 1);
  half.tensors[0].wire = DataType::kFloat16;
  for (const UnitSpec& spec : {floats("a", 1), doubles("b", 1), max, floats("c", 1), scaled, doubles("d", 1), half}) {
    submit(*job, spec);
  }
  EXPECT_EQ(buckets(*job).size(), 2u);
  complete_one(*job);
  EXPECT_EQ(buckets(*job), (std::vector<Names>{{"x"}, {"y"}, {"a", "c"}, {"b", "d"}, {"max"}, {"scaled"}, {"half"}}));
}

TEST_F(ControlFusion, ThresholdAndItsNeighbours) {
  constexpr int64_t kBytes = 64;
  Simulation job(2, threshold(kBytes));
  const auto bytes = [](const std::string& name, int64_t n) { return make_unit(name, {n}, DataType::kUInt8); };
  submit_together(job, {bytes("below", kBytes - 1), bytes("one", 1), bytes("exact", kBytes), bytes("above", kBytes + 1),
                        bytes("two", 2)});
  EXPECT_EQ(buckets(job), (std::vector<Names>{{"below", "one"}, {"exact"}, {"above"}, {"two"}}));
}

TEST_F(ControlFusion, AHugeUnitBetweenSmallOnesStandsAlone) {
  Simulation job(2, threshold(64));
  submit_together(job, {floats("a", 1), floats("huge", 1000), floats("b", 1)});
  EXPECT_EQ(buckets(job), (std::vector<Names>{{"a", "b"}, {"huge"}}));
}

TEST_F(ControlFusion, AFullBucketGainsNothingByWaiting) {
  const auto job = held(2, threshold(64));
  for (int i = 0; i < 4; ++i) submit(*job, floats(numbered("t", i), 4));
  EXPECT_EQ(buckets(*job).size(), 2u);
  submit(*job, floats("fills", 8));  // 2 * 16 + 32
  EXPECT_EQ(buckets(*job).back(), (Names{"t2", "t3", "fills"}));
  submit(*job, floats("alone", 16));
  EXPECT_EQ(buckets(*job).back(), Names{"alone"});
  submit(*job, floats("p", 10));
  EXPECT_EQ(buckets(*job).size(), 4u);
  submit(*job, floats("q", 10));  // does not fit beside p, which therefore cannot grow any more
  EXPECT_EQ(buckets(*job).back(), Names{"p"});
}

TEST_F(ControlFusion, ThresholdZeroFusesNothing) {
  const auto job = held(2, threshold(0));
  submit_together(*job, {floats("a", 1), floats("b", 0), floats("c", 1)});
  submit(*job, floats("d", 1));
  EXPECT_EQ(buckets(*job), (std::vector<Names>{{"a"}, {"b"}, {"c"}, {"d"}}));
}

TEST_F(ControlFusion, GroupsFuseWholeAndMixedOnesStandAlone) {
  Simulation job(2, Config{});
  UnitSpec mixed = make_group("mixed", 2);
  mixed.tensors[1].dtype = mixed.tensors[1].wire = DataType::kFloat64;
  submit_together(job, {floats("a", 1), make_group("g", 3), mixed, floats("b", 1)});
  EXPECT_EQ(buckets(job), (std::vector<Names>{{"a", "g", "b"}, {"mixed"}}));
}

TEST_F(ControlFusion, BroadcastsFuseByRoot) {
  Simulation job(2, Config{});
  std::vector<UnitSpec> specs;
  for (int i = 0; i < 4; ++i) {
    specs.push_back(floats(numbered("w", i), 1));
    specs.back().kind = OpKind::kBroadcast;
    specs.back().root = i % 2;
  }
  submit_together(job, specs);
  EXPECT_EQ(buckets(job), (std::vector<Names>{{"w0", "w2"}, {"w1", "w3"}}));
}

TEST_F(ControlFusion, BarriersNeitherWaitNorCount) {
  const auto job = held(2, Config{});
  UnitSpec barrier;
  barrier.kind = OpKind::kBarrier;
  for (int i = 0; i < 3; ++i) {
    barrier.name = numbered("barrier", i);
    submit(*job, barrier);
  }
  submit(*job, floats("a", 1));
  submit(*job, floats("b", 1));
  submit(*job, floats("c", 1));
  barrier.name = "last";
  submit(*job, barrier);
  EXPECT_EQ(buckets(*job), (std::vector<Names>{{"barrier0"}, {"barrier1"}, {"barrier2"}, {"a"}, {"b"}, {"last"}}));
}

TEST_F(ControlFusion, BusySetsDoNotHoldUpOthers) {
  const auto job = held(3, Config{});
  submit(*job, make_set("pair", {1, 2}));
  const auto in_pair = [&](const std::string& name) {
    UnitSpec spec = floats(name, 1);
    spec.process_set = 1;
    job->submit(1, spec);
    job->submit(2, spec);
    job->run();
  };
  for (const char* name : {"a", "b", "c"}) in_pair(name);
  EXPECT_EQ(job->order(2), (Names{"pair", "a", "b"}));
  submit(*job, floats("global", 1));
  EXPECT_EQ(job->order(2), (Names{"pair", "a", "b", "global"}));
  EXPECT_EQ(job->order(0), (Names{"pair", "global"}));
  EXPECT_TRUE((*job)[2].running.empty());
  ASSERT_EQ((*job)[1].running.size(), 2u);
  complete_one(*job, 1);
  EXPECT_EQ(job->order(2).back(), "c");
}

TEST_F(ControlFusion, ADepartedReporterCountsAsDone) {
  const auto job = held(3, Config{});
  submit(*job, make_set("pair", {1, 2}));
  for (const char* name : {"a", "b"}) {
    UnitSpec spec = floats(name, 1);
    spec.process_set = 1;
    job->submit(1, spec);
    job->submit(2, spec);
    job->run();
  }
  EXPECT_TRUE(job->coordinator.next_deadline().has_value());
  job->leave(1, true, "done");
  EXPECT_FALSE(job->coordinator.next_deadline().has_value());
}

}  // namespace
}  // namespace fusewire
