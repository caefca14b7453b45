// Cache ids: given and taken by the root, never misunderstood.
#include <algorithm>

#include "control/response_cache.h"
#include "control_simulation.h"

namespace fusewire {
namespace {

Config capacity(int64_t tensors) {
  Config config;
  config.cache_capacity = tensors;
  return config;
}

TEST(ControlCache, SecondRoundIsNumbersOnly) {
  Simulation job(3, Config{});
  for (int round = 0; round < 3; ++round) {
    for (int i = 0; i < 50; ++i) job.submit_everywhere(make_unit(numbered("layer.", i)));
    for (int rank = 0; rank < 3; ++rank) {
      job.send(rank);
      if (round > 0) {
        EXPECT_LT(job[rank].up.back().size(), 64u);  // a byte per unit and a little more
      }
    }
    job.run();
  }
  EXPECT_EQ(job[2].full_requests, 50u);
  EXPECT_EQ(job[2].id_requests, 100u);
}

TEST(ControlCache, ZeroCapacityGivesNoIds) {
  Simulation job(2, capacity(0));
  for (int round = 0; round < 3; ++round) {
    job.submit_everywhere(make_unit("x"));
    job.run();
  }
  EXPECT_EQ(job[0].id_requests, 0u);
  EXPECT_EQ(job.order(1).size(), 3u);
}

TEST(ControlCache, NamesThatNeverComeBackTakeNoIds) {
  Simulation job(2, capacity(4));
  job.submit_everywhere(make_unit("kept"));
  job.run();
  for (int i = 0; i < 20; ++i) {
    job.submit_everywhere(make_unit(numbered("allreduce.noname.", i)));
    job.run();
  }
  job.forget_results();
  job.submit_everywhere(make_unit("kept"));
  job.run();
  EXPECT_EQ(job[0].id_requests, 1u);
}

TEST(ControlCache, FiveNamesThroughTwoPlacesInAnyOrder) {
  for (unsigned seed = 0; seed < 20; ++seed) {
    Simulation job(4, capacity(2), seed);
    job.lazy_root = seed % 2 == 0;
    for (int round = 0; round < 20; ++round) {
      std::vector<std::vector<int>> left(4, {0, 1, 2, 3, 4});
      for (auto& names : left) std::shuffle(names.begin(), names.end(), job.random);
      for (size_t submitted = 0; submitted < 20;) {
        const size_t rank = job.random() % 4;
        if (left[rank].empty()) continue;
        const int name = left[rank].back();
        left[rank].pop_back();
        ++submitted;
        job.submit(static_cast<int>(rank), make_unit(numbered("t", name), {name, round / 7}));
        job.some_steps(3);
      }
      job.run();
      ASSERT_EQ(job.order(0).size(), 5u);
      for (int rank = 0; rank < 4; ++rank) {
        ASSERT_EQ(job[rank].ran, job[0].ran);
        ASSERT_TRUE(job[rank].failed.empty());
        ASSERT_FALSE(job[rank].fatal);
      }
      for (Simulation::Rank& rank : job.ranks) rank.ran.clear();
      job.expect_idle();
    }
    EXPECT_GT(job[0].id_requests, 0u);
    EXPECT_GT(job[0].full_requests, 5u);
  }
}

TEST(ControlCache, HitOnSomeRanksMissOnOthers) {
  Simulation job(2, capacity(1));
  job.submit_everywhere(make_unit("x"));
  job.run();
  job.forget_results();

  // Rank 0 announces x by its id while y, which the root has not yet seen twice, is about to push x out.
  job.submit(0, make_unit("y"));
  job.send(0);
  job.submit(0, make_unit("x"));
  job.send(0);
  job.submit(1, make_unit("y"));
  job.send(1);
  job.deliver_up(0);  // y
  job.deliver_up(1);  // y: agreed, x is evicted
  job.deliver_up(0);  // x by the evicted id
  job.deliver_down(1);
  job.submit(1, make_unit("x"));  // rank 1 knows of the eviction
  job.run();
  EXPECT_EQ(job[0].id_requests, 1u);
  EXPECT_EQ(job[1].id_requests, 0u);
  EXPECT_EQ(job.order(0), (std::vector<std::string>{"y", "x"}));
  EXPECT_EQ(job[1].ran, job[0].ran);
  job.expect_idle();
}

TEST(ControlCache, AnUnsentAnnouncementByAnEvictedIdIsSpeltOut) {
  Simulation job(2, capacity(1));
  job.submit_everywhere(make_unit("x"));
  job.run();
  job.forget_results();
  job.submit_everywhere(make_unit("y"));
  for (int rank = 0; rank < 2; ++rank) {
    job.send(rank);
    job.deliver_up(rank);
  }
  job.submit(0, make_unit("x"));  // by its id, but nothing is sent before the eviction arrives
  job.deliver_down(0);
  job.send(0);
  EXPECT_EQ(job[0].id_requests, 0u);
  job.submit(1, make_unit("x"));
  job.run();
  EXPECT_EQ(job.order(1), (std::vector<std::string>{"y", "x"}));
  job.expect_idle();
}

TEST(ControlCache, ANewDescriptionOnAllRanksReplacesTheOld) {
  Simulation job(3, capacity(8));
  job.submit_everywhere(make_unit("x", {2}));
  job.run();
  for (const auto change : std::vector<void (*)(UnitSpec&)>{
           [](UnitSpec& s) { s.tensors[0].shape = {7, 7}; }, [](UnitSpec& s) { s.op = ReduceOp::kMax; },
           [](UnitSpec& s) { s.prescale = 2; },
           [](UnitSpec& s) { s.tensors[0].dtype = s.tensors[0].wire = DataType::kInt64; }}) {
    UnitSpec changed = make_unit("x", {2});
    change(changed);
    job.forget_results();
    for (int round = 0; round < 2; ++round) {
      job.submit_everywhere(changed);
      job.run();
    }
    for (int rank = 0; rank < 3; ++rank) {
      EXPECT_EQ(job[rank].ran.size(), 2u);
      EXPECT_EQ(job[rank].full_requests, 1u);
      EXPECT_EQ(job[rank].id_requests, 1u);
    }
  }
  job.expect_idle();
}

// A rank that is in none of the busy sets acknowledges nothing; ids must stay bounded, and the others go on.
TEST(ControlCache, ASilentRankDoesNotLetIdsGrow) {
  Simulation job(3, capacity(2));
  job.submit_everywhere(make_set("pair", {0, 1}));
  job.run();
  for (int i = 0; i < 50; ++i) {
    UnitSpec spec = make_unit(numbered("t", i));
    spec.process_set = 1;
    job.submit(0, spec);
    job.submit(1, spec);
    job.run_without(2);
  }
  EXPECT_EQ(job.order(0).size(), 51u);
  job.run();
  UnitSpec spec = make_unit("t49");
  spec.process_set = 1;
  for (int round = 0; round < 2; ++round) {
    job.forget_results();
    job.submit(0, spec);
    job.submit(1, spec);
    job.run();
  }
  EXPECT_EQ(job[0].id_requests, 1u);  // caching works again once the silent rank has caught up
}

// ---------------------------------------------------------------------------------------------------------------------

Unit proposal(const std::string& name) {
  Unit unit;
  unit.proposed = std::make_shared<const Description>(make_unit(name));
  return unit;
}

TEST(ResponseCacheTest, AnIdIsReusedOnlyAfterEveryRankHasAcknowledged) {
  ResponseCache cache(1, 3);
  Unit a = proposal("a"), b = proposal("b"), c = proposal("c");
  EXPECT_EQ(cache.insert(&a), 0u);
  EXPECT_FALSE(cache.has_room());
  EXPECT_EQ(cache.least_recent(), nullptr);  // in flight
  cache.settle(&a);
  EXPECT_EQ(cache.least_recent(), &a);
  cache.evict(&a, 5);
  EXPECT_EQ(cache.insert(&b), 1u);
  EXPECT_EQ(cache.take_evicted(5), std::vector<CacheId>{0});
  cache.acknowledge(0, 5);
  cache.acknowledge(1, 7);
  cache.acknowledge(2, 4);
  ASSERT_NE(cache.find(0), nullptr);
  EXPECT_EQ(cache.find(0)->unit, nullptr);
  EXPECT_EQ(cache.find(0)->description->spec.name, "a");
  cache.settle(&b);
  EXPECT_EQ(cache.least_recent(), nullptr);  // one eviction is under way, that is as many as there are places
  cache.acknowledge(2, 5);
  EXPECT_EQ(cache.find(0), nullptr);
  ASSERT_EQ(cache.least_recent(), &b);
  cache.evict(&b, 8);
  EXPECT_EQ(cache.insert(&c), 0u);
  EXPECT_EQ(c.id, 0u);
}

TEST(ResponseCacheTest, ARankThatLeavesOwesNoAcknowledgement) {
  ResponseCache cache(1, 2);
  Unit a = proposal("a");
  cache.insert(&a);
  cache.evict(&a, 1);
  cache.take_evicted(1);
  cache.acknowledge(0, 1);
  EXPECT_NE(cache.find(0), nullptr);
  cache.leave(1);
  EXPECT_EQ(cache.find(0), nullptr);
}

TEST(ResponseCacheTest, EvictsTheLeastRecentlyUsed) {
  ResponseCache cache(3, 1);
  Unit a = proposal("a"), b = proposal("b"), c = proposal("c");
  for (Unit* unit : {&a, &b, &c}) {
    cache.insert(unit);
    cache.settle(unit);
  }
  cache.begin(&a);
  cache.settle(&a);
  EXPECT_EQ(cache.least_recent(), &b);
  cache.begin(&b);
  EXPECT_EQ(cache.least_recent(), &c);
}

}  // namespace
}  // namespace fusewire
