// Stall reports by a clock that only the test moves.
#include "control_simulation.h"

namespace fusewire {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

Config times(double check, double abort) {
  Config config;
  config.stall_check_seconds = check;
  config.stall_abort_seconds = abort;
  return config;
}

testing::AssertionResult says(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return testing::AssertionSuccess();
  return testing::AssertionFailure() << "'" << part << "' is not in:\n" << text;
}

TEST(ControlStall, NamesTheLateRankItsTensorsAndWhatItDidLast) {
  Simulation job(3, times(60, 0));
  EXPECT_FALSE(job.coordinator.next_deadline());
  job.submit_everywhere(make_unit("warm"));
  job.run();
  EXPECT_FALSE(job.coordinator.next_deadline());
  job.advance(seconds(5));
  const TimePoint begin = job.now;
  for (const int rank : {0, 1}) {
    job.submit(rank, make_unit("layer1"));
    job.submit(rank, make_unit("layer2"));
  }
  job.run();
  EXPECT_EQ(job.coordinator.next_deadline(), begin + milliseconds(59'500)) << "to ask what rank 2 does";
  job.advance(milliseconds(59'999));
  EXPECT_TRUE(job.reports.empty());
  job.advance(milliseconds(1));
  ASSERT_EQ(job.reports.size(), 1u);
  const std::string& text = job.reports.front().second;
  EXPECT_TRUE(says(text, "rank 2 has not submitted 'layer1', 'layer2'")) << text;
  EXPECT_TRUE(says(text, "ranks 0, 1 have waited for 60 s"));
  EXPECT_TRUE(says(text, "rank 2 last submitted 'warm' 65 s ago"));
  EXPECT_EQ(text.find("unnamed"), std::string::npos);

  // Then training goes on.
  job.submit(2, make_unit("layer2"));
  job.submit(2, make_unit("layer1"));
  job.run();
  EXPECT_EQ(job[0].ran, job[2].ran);
  job.expect_idle();
}

TEST(ControlStall, TellsWhatLateRanksDo) {
  Simulation job(4, times(10, 25));
  job.delivers_probes = true;
  for (const int rank : {0, 3}) job.submit(rank, make_unit("x"));
  job.run();
  job.advance(milliseconds(9'500));
  EXPECT_TRUE(job.reports.empty());
  for (int rank = 0; rank < 4; ++rank) EXPECT_EQ(job[rank].probes, rank == 1 || rank == 2 ? 1 : 0) << rank;
  job.advance(milliseconds(500));
  ASSERT_EQ(job.reports.size(), 1u);
  const std::string& text = job.reports.front().second;
  EXPECT_TRUE(says(text, "\n  what rank 1 does:\n    rank 1 reads data\n    line two\nrank 2 has not submitted"));
  EXPECT_TRUE(says(text, "what rank 2 does"));

  // Asked again for the next one, and before the abort, whose message has it for every rank.
  job.advance(seconds(10));
  EXPECT_EQ(job[1].probes, 2);
  job.advance(seconds(5));
  job.run();
  EXPECT_EQ(job[1].probes, 3);
  for (int rank = 0; rank < 4; ++rank) {
    ASSERT_TRUE(job[rank].fatal);
    EXPECT_TRUE(says(job[rank].fatal->message, "what rank 2 does:\n    rank 2 reads data"));
  }
}

TEST(ControlStall, ARankThatCannotAnswerDelaysNothing) {
  Simulation job(3, times(10, 0));
  job.delivers_probes = true;
  job.answers_probes = false;
  job.submit(0, make_unit("x"));
  job.submit(1, make_unit("x"));
  job.run();
  const TimePoint begin = job.now;
  job.advance(seconds(10));
  ASSERT_EQ(job.reports.size(), 1u);
  EXPECT_EQ(job.reports.front().first, begin + seconds(10));
  EXPECT_TRUE(says(job.reports.front().second, "rank 2 did not answer when it was asked what it does"));

  // It comes to itself: nothing of the question is left over.
  job.answers_probes = true;
  job.submit(2, make_unit("x"));
  job.run();
  job.expect_idle();
}

TEST(ControlStall, AnAnswerIsCutToItsLargestSize) {
  Participant participant(1, 2);
  participant.tell_activity("begin" + std::string(100'000, '.') + "end");
  const RequestList list = decode_requests(encode(participant.take_outgoing()));
  ASSERT_TRUE(list.activity);
  EXPECT_LE(list.activity->size(), kLongestActivity);
  EXPECT_EQ(list.activity->substr(0, 5), "begin");
  EXPECT_EQ(list.activity->substr(list.activity->size() - 3), "end");
  EXPECT_FALSE(participant.has_outgoing());
}

TEST(ControlStall, OncePerInterval) {
  Simulation job(2, times(10, 0));
  job.submit(0, make_unit("x"));
  job.run();
  const TimePoint begin = job.now;
  job.advance(seconds(35));
  ASSERT_EQ(job.reports.size(), 3u);
  EXPECT_EQ(job.ticks, 6);  // the timer fires when there is something to ask or to say and never else
  for (int i = 0; i < 3; ++i) EXPECT_EQ(job.reports[static_cast<size_t>(i)].first, begin + seconds(10 * (i + 1)));
  EXPECT_TRUE(says(job.reports[0].second, "rank 1 last submitted nothing yet"));

  // A unit that begins to wait shortly before a report has to wait for the next one.
  job.submit(1, make_unit("y"));
  job.run();
  job.submit(1, make_unit("x"));
  job.run();
  EXPECT_EQ(job.coordinator.next_deadline(), begin + milliseconds(44'500));
  job.advance(seconds(10));
  ASSERT_EQ(job.reports.size(), 4u);
  EXPECT_TRUE(says(job.reports[3].second, "rank 0 has not submitted 'y'"));
}

TEST(ControlStall, CanBeTurnedOff) {
  Simulation job(2, times(0, 0));
  job.submit(0, make_unit("x"));
  job.run();
  EXPECT_FALSE(job.coordinator.next_deadline());
  job.advance(std::chrono::hours(1000));
  EXPECT_TRUE(job.reports.empty());
  job.submit(1, make_unit("x"));
  job.run();
  job.expect_idle();
}

TEST(ControlStall, LongListsAreCut) {
  Simulation job(40, times(10, 0));
  for (int i = 0; i < 30; ++i) job.submit(0, make_unit(numbered("t", i)));
  job.run();
  job.advance(seconds(10));
  ASSERT_EQ(job.reports.size(), 1u);
  const std::string& text = job.reports.front().second;
  EXPECT_TRUE(says(text, "'t7' and 22 more"));
  EXPECT_TRUE(says(text, "rank 0 has waited for"));
  EXPECT_TRUE(says(text, "ranks 9-39 are late, too"));
}

TEST(ControlStall, UnnamedCallsAreMatchedByCount) {
  Simulation job(3, times(10, 0));
  const auto unnamed = [](int n) { return make_unit(numbered("allreduce.noname.", n)); };
  for (int n = 0; n < 3; ++n) {
    for (int rank = 0; rank < 3; ++rank) {
      if (n < 2 || rank != 1) job.submit(rank, unnamed(n));
    }
  }
  job.run();
  job.advance(seconds(10));
  ASSERT_EQ(job.reports.size(), 1u);
  const std::string& text = job.reports.front().second;
  EXPECT_TRUE(says(text, "rank 1 has not submitted 'allreduce.noname.2'"));
  EXPECT_TRUE(says(text,
                   "unnamed calls are matched by their count, and the counts differ: rank 1 has made fewer of "
                   "them than ranks 0, 2"));
}

TEST(ControlStall, EveryRankRaisesWhenTheAbortTimeIsOver) {
  Simulation job(3, times(10, 25));
  job.submit(0, make_unit("x"));
  job.submit(2, make_unit("x"));
  job.run();
  const TimePoint begin = job.now;
  job.advance(milliseconds(24'999));
  EXPECT_EQ(job.reports.size(), 2u);
  EXPECT_TRUE(says(job.reports.front().second, "25 s"));
  EXPECT_EQ(job.coordinator.next_deadline(), begin + seconds(25));
  job.advance(milliseconds(1));
  job.run();
  for (int rank = 0; rank < 3; ++rank) {
    ASSERT_TRUE(job[rank].fatal);
    EXPECT_EQ(job[rank].fatal->code, ErrorCode::kStalled);
    EXPECT_EQ(job[rank].fatal->rank, 1);
    EXPECT_EQ(job[rank].fatal->name, "x");
    EXPECT_TRUE(says(job[rank].fatal->message, "rank 1 has not submitted 'x'"));
    EXPECT_EQ(job[rank].participant->take_pending().size(), rank == 1 ? 0u : 1u);
    job[rank].fatal.reset();
  }
  EXPECT_FALSE(job.coordinator.next_deadline());

  // The late rank gets the same when it comes back.
  job.submit(1, make_unit("x"));
  job.run();
  ASSERT_TRUE(job[1].fatal);
  EXPECT_EQ(job[1].fatal->code, ErrorCode::kStalled);
}

TEST(ControlStall, SeveralLateRanksHaveNoSingleCulprit) {
  Simulation job(3, times(0, 5));
  job.submit(0, make_unit("a"));
  job.submit(1, make_unit("b"));
  job.run();
  job.advance(seconds(5));
  job.run();
  ASSERT_TRUE(job[2].fatal);
  EXPECT_EQ(job[2].fatal->rank, -1);
  EXPECT_TRUE(says(job[2].fatal->message, "rank 0 has not submitted 'b'"));
  EXPECT_TRUE(says(job[2].fatal->message, "rank 1 has not submitted 'a'"));
}

TEST(ControlStall, ABucketThatDoesNotEnd) {
  Simulation job(2, times(10, 30));
  job.hold_completions = true;
  job.submit_everywhere(make_unit("x"));
  job.submit_everywhere(make_unit("y"));
  job.run();
  const TimePoint begin = job.now;
  EXPECT_EQ(job.coordinator.next_deadline(), begin + milliseconds(9'500));
  job.advance(seconds(10));
  ASSERT_EQ(job.reports.size(), 1u);
  EXPECT_EQ(job.reports.front().first, begin + seconds(10));
  EXPECT_TRUE(says(job.reports.front().second, "'x' and 1 more"));
  EXPECT_TRUE(says(job.reports.front().second, "rank 0 has not reported"));
  job.advance(seconds(20));
  job.run();
  ASSERT_TRUE(job[1].fatal);
  EXPECT_EQ(job[1].fatal->code, ErrorCode::kStalled);
}

TEST(ControlStall, RanksInOtherSetsAreNotBlamed) {
  Simulation job(3, times(10, 0));
  job.submit_everywhere(make_set("pair", {0, 1}));
  job.run();
  UnitSpec spec = make_unit("x");
  spec.process_set = 1;
  job.submit(0, spec);
  job.run();
  job.advance(seconds(10));
  ASSERT_EQ(job.reports.size(), 1u);
  EXPECT_TRUE(says(job.reports.front().second, "rank 1 has not submitted 'x'"));
  EXPECT_EQ(job.reports.front().second.find("rank 2"), std::string::npos);
}

}  // namespace
}  // namespace fusewire
