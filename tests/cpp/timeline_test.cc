// The timeline: a file that is valid JSON at every moment, and a story that fits what ranks did.
#include "engine/timeline.h"

#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "engine/timeline_file.h"
#include "json_value.h"
#include "thread_ranks.h"

namespace fusewire {
namespace {

using testing::Json;

class Folder {
 public:
  Folder() {
    char name[] = "/tmp/fusewire-timeline-XXXXXX";
    path_ = ::mkdtemp(name);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string operator/(const std::string& name) const { return path_ + "/" + name; }

 private:
  std::string path_;
};

std::string read(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  return text.str();
}

// All events of the file; the test fails where the file is no valid JSON.
std::vector<Json> events_of(const std::string& path) {
  const Json root = Json::parse(read(path));
  return root["traceEvents"].items();
}

std::vector<Json> named(const std::vector<Json>& events, const std::string& phase, const std::string& name) {
  std::vector<Json> found;
  for (const Json& event : events) {
    if (event["ph"].text() == phase && event["name"].text() == name) found.push_back(event);
  }
  return found;
}

// The name of a lane.
std::string lane_of(const std::vector<Json>& events, const Json& event) {
  for (const Json& lane : named(events, "M", "thread_name")) {
    if (lane["tid"].number() == event["tid"].number()) return lane["args"]["name"].text();
  }
  return "";
}

TEST(TimelinePath, ARankInThePathOrBeforeItsExtension) {
  EXPECT_EQ(timeline_path("/a/t.{rank}.json", 3, 4), "/a/t.3.json");
  EXPECT_EQ(timeline_path("/a.b/{rank}/t", 3, 1), "/a.b/3/t");
  EXPECT_EQ(timeline_path("/a.b/t.json", 3, 4), "/a.b/t.3.json");
  EXPECT_EQ(timeline_path("/a.b/t", 3, 4), "/a.b/t.3");
  EXPECT_EQ(timeline_path("t.json", 0, 1), "t.json");
}

TEST(JsonEscaped, AnyBytesBecomeValidText) {
  for (int a = 0; a < 256; ++a) {
    for (const int b : std::initializer_list<int>{0, '"', '\\', 'x', 0x80, 0xbf, 0xc3, 0xe2, 0xf0, 0xff}) {
      const std::string bytes = {static_cast<char>(a), static_cast<char>(b), static_cast<char>(0x82), 'z'};
      const std::string json = "\"" + json_escaped(bytes) + "\"";
      EXPECT_EQ(Json::parse(json).text().back(), 'z') << a << " " << b;
    }
  }
  EXPECT_EQ(json_escaped("weight \xe2\x82\xac \xf0\x9f\x98\x80"), "weight \xe2\x82\xac \xf0\x9f\x98\x80");
  EXPECT_EQ(json_escaped("a\"b\\c\n\x7f"), "a\\\"b\\\\c\\u000a\\u007f");
  EXPECT_EQ(json_escaped("\xed\xa0\x80"), "\\ufffd\\ufffd\\ufffd") << "half of a surrogate pair";
  EXPECT_LT(json_escaped(std::string(5000, '\x01'), 100).size(), 110u);
}

TEST(TimelineFile, IsValidAfterEveryWriteAndHasWhatWasWritten) {
  const Folder folder;
  const std::string path = folder / "t.json";
  TimelineFile file(path, "{\"n\":0}");
  size_t count = 1;
  EXPECT_EQ(events_of(path).size(), count);
  for (int round = 0; round < 60; ++round) {
    for (int i = 0; i < 1 + round; ++i, ++count) {
      file.append("{\"n\":" + std::to_string(count) + ",\"x\":\"" + std::string((count * 37) % 900, 'x') + "\"}");
    }
    ASSERT_TRUE(file.flush());
    const auto events = events_of(path);
    ASSERT_EQ(events.size(), count);
    EXPECT_EQ(events.back()["n"].number(), static_cast<double>(count - 1));
  }
  file.append("{\"too long\":\"" + std::string(5000, 'x') + "\"}");
  file.finish();
  EXPECT_EQ(events_of(path).size(), count);
  EXPECT_LT(read(path).size(), static_cast<size_t>(file.bytes()) + 10) << "the blanks are gone";
  EXPECT_NE(::access((path + ".part").c_str(), F_OK), 0);
}

// A write that is cut between two pages, as SIGKILL may do.
TEST(TimelineFile, NoEventCrossesAPage) {
  const Folder folder;
  const std::string path = folder / "t.json";
  TimelineFile file(path, "{}");
  for (int i = 0; i < 300; ++i) file.append("{\"x\":\"" + std::string(static_cast<size_t>(i) * 5, 'x') + "\"}");
  ASSERT_TRUE(file.flush());
  const std::string before = read(path);
  for (int i = 0; i < 40; ++i) file.append("{\"y\":\"" + std::string(700, 'y') + "\"}");
  ASSERT_TRUE(file.flush());
  const std::string after = read(path);
  if (after.size() != before.size()) GTEST_SKIP() << "it went to a new file";
  size_t cuts = 0;
  for (size_t page = 4096; page < after.size(); page += 4096, ++cuts) {
    EXPECT_NO_THROW(Json::parse(after.substr(0, page) + before.substr(page))) << page;
  }
  EXPECT_GT(cuts, 10u);
}

TEST(TimelineFile, SaysWhyItCannotBeMade) {
  const Error error = testing::error_of([] { TimelineFile("/nowhere/at/all.json", "{}"); });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_NE(std::string(error.what()).find("/nowhere/at/all.json"), std::string::npos);
}

TEST(TraceRing, RecordsOfManyThreadsArriveWholeOrAreCounted) {
  TraceRing ring(256);
  constexpr int kThreads = 4;
  constexpr int kEach = 20000;
  std::atomic<int> writing{kThreads};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kEach; ++i) {
        TraceRecord record;
        record.unit = static_cast<uint64_t>(t);
        record.a = i;
        ring.push(record, std::string(static_cast<size_t>((i * 7) % 200), static_cast<char>('a' + t)));
      }
      --writing;
    });
  }
  std::array<int64_t, kThreads> last{-1, -1, -1, -1};
  uint64_t received = 0;
  TraceRecord record;
  std::string text;
  const auto drain = [&] {
    while (ring.pop(record, text)) {
      ++received;
      ASSERT_LT(last[record.unit], record.a) << "in order per thread";
      last[record.unit] = record.a;
      ASSERT_EQ(text, std::string(static_cast<size_t>((record.a * 7) % 200), static_cast<char>('a' + record.unit)));
    }
  };
  while (writing > 0) drain();
  for (std::thread& thread : threads) thread.join();
  drain();
  EXPECT_EQ(received + ring.take_dropped(), static_cast<uint64_t>(kThreads) * kEach);
  EXPECT_TRUE(ring.empty());
  EXPECT_GT(ring.push(record, "there is room again"), 0u);
}

// ---------------------------------------------------------------------------------------------------------------------

void reduce(Engine& engine, const std::string& name, size_t elements = 100) {
  std::vector<float> values(elements, 1.0f);
  engine.wait(engine.submit(testing::allreduce(name, values)));
}

TEST(Timeline, ShowsTheLifeOfATensorOnItsLane) {
  const Folder folder;
  std::barrier together(2);  // rank 0's timeline has what rank 1 announces, as soon as it does
  const std::string odd = "quo\"te \\ \n \xff\xfe layer";
  testing::with_engines(2, [&](Engine& engine) {
    reduce(engine, "before");
    engine.start_timeline(folder / "t.json", false);
    together.arrive_and_wait();
    reduce(engine, odd);
    reduce(engine, "big", 200'000);
    reduce(engine, "allreduce.noname.7");
    engine.stop_timeline();
    together.arrive_and_wait();
    reduce(engine, "after");
  });
  for (const int rank : {0, 1}) {
    const auto events = events_of(folder / ("t." + std::to_string(rank) + ".json"));
    for (const Json& event : events) EXPECT_EQ(event["pid"].number(), rank);
    const auto begun = named(events, "B", "negotiate");
    ASSERT_EQ(begun.size(), 3u) << "neither 'before' nor 'after'";
    EXPECT_EQ(named(events, "E", "negotiate").size(), 3u);
    EXPECT_EQ(begun[0]["args"]["bytes"].number(), 400);
    EXPECT_EQ(begun[0]["args"]["op"].text(), "Sum");
    EXPECT_EQ(lane_of(events, begun[0]), "quo\"te \\ \n \ufffd\ufffd layer");
    EXPECT_EQ(lane_of(events, begun[2]), "allreduce.noname");

    // A bucket with its contents, and the tensor's span in the same time.
    const auto spans = named(events, "B", "allreduce");
    std::vector<Json> buckets;
    for (const Json& span : spans) {
      if (lane_of(events, span) == "buckets") buckets.push_back(span);
    }
    ASSERT_EQ(buckets.size(), 3u);
    EXPECT_EQ(spans.size(), 6u);
    EXPECT_EQ(buckets[1]["args"]["tensors"].items().at(0).text(), "big");
    EXPECT_EQ(buckets[1]["args"]["bytes"].number(), 800'000);
    EXPECT_EQ(named(events, "X", "queue").size(), 3u);

    // The big one goes through the plane in chunks; its own lane shows them, and the totals are theirs.
    const auto big = begun[1]["tid"].number();
    double pack = 0;
    size_t chunks = 0;
    for (const Json& step : named(events, "X", "pack")) {
      if (step["tid"].number() != big) continue;
      pack += step["dur"].number();
      ++chunks;
    }
    EXPECT_GT(chunks, 1u);
    for (const Json& end : named(events, "E", "allreduce")) {
      if (end["tid"].number() == big) {
        EXPECT_NEAR(end["args"]["pack_us"].number(), pack, 0.1 + pack / 100);
      }
    }
    // The root tells who was ready when.
    size_t ready = named(events, "i", "rank 0 is ready").size() + named(events, "i", "rank 1 is ready").size();
    EXPECT_EQ(ready, rank == 0 ? 6u : 0u);
  }
}

TEST(Timeline, GroupsProcessSetsBarriersAndErrors) {
  const Folder folder;
  Config config;
  config.timeline = folder / "t.{rank}.json";
  config.timeline_mark_cycles = true;
  testing::with_engines(
      2,
      [&](Engine& engine) {
        std::vector<float> a(10, 1.0f);
        std::vector<float> b(engine.rank() == 0 ? 5u : 6u, 1.0f);
        Submission group = testing::allreduce("group", a);
        group.tensors.push_back(testing::in_place(a));
        engine.wait(engine.submit(std::move(group)));
        Submission set;
        set.kind = OpKind::kAddProcessSet;
        set.name = "add";
        set.ranks = {0, 1};
        engine.wait(engine.submit(std::move(set)));
        Submission in_set = testing::allreduce("in set", a);
        in_set.process_set = 1;
        engine.wait(engine.submit(std::move(in_set)));
        Submission barrier;
        barrier.kind = OpKind::kBarrier;
        barrier.name = "barrier";
        engine.wait(engine.submit(std::move(barrier)));
        testing::error_of([&] { engine.wait(engine.submit(testing::allreduce("mismatch", b))); });
      },
      config);
  const auto events = events_of(folder / "t.0.json");
  EXPECT_EQ(named(events, "B", "negotiate").size(), 5u);
  EXPECT_EQ(named(events, "E", "negotiate").size(), 5u);
  ASSERT_EQ(named(events, "i", "failed").size(), 1u);
  EXPECT_NE(named(events, "i", "failed")[0]["args"]["error"].text().find("mismatch"), std::string::npos);
  EXPECT_FALSE(named(events, "i", "cycle").empty());
  bool set_lane = false;
  for (const Json& lane : named(events, "M", "thread_name")) {
    set_lane = set_lane || lane["args"]["name"].text() == "buckets of process set 1";
  }
  EXPECT_TRUE(set_lane);
}

TEST(Timeline, StopsAtItsLargestSizeAndSaysSo) {
  const Folder folder;
  Config config;
  config.timeline = folder / "t.json";
  config.timeline_limit = 40'000;
  testing::with_engines(
      1,
      [&](Engine& engine) {
        for (int i = 0; i < 500; ++i) {
          reduce(engine, "tensor " + std::to_string(i));
          EXPECT_LE(read(folder / "t.json").size(), 40'000u) << "blanks count too";
        }
      },
      config);
  EXPECT_LT(read(folder / "t.json").size(), 40'000u);
  EXPECT_NE(events_of(folder / "t.json").back()["name"].text().find("recording stopped"), std::string::npos);
}

TEST(Timeline, MayBeStartedAgainButNotTwice) {
  const Folder folder;
  testing::with_engines(1, [&](Engine& engine) {
    engine.stop_timeline();
    engine.start_timeline(folder / "a.json", false);
    const Error error = testing::error_of([&] { engine.start_timeline(folder / "b.json", false); });
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    reduce(engine, "x");
    engine.stop_timeline();
    engine.start_timeline(folder / "b.json", false);
    reduce(engine, "y");
  });
  EXPECT_EQ(named(events_of(folder / "a.json"), "B", "negotiate").size(), 1u);
  EXPECT_EQ(named(events_of(folder / "b.json"), "B", "negotiate").size(), 1u);
}

TEST(Timeline, StartsAndStopsWhileOthersWork) {
  const Folder folder;
  testing::with_engines(2, [&](Engine& engine) {
    std::atomic<bool> done{false};
    std::thread switcher([&] {
      for (int i = 0; i == 0 || !done; ++i) {
        engine.start_timeline(folder / (std::to_string(i % 3) + ".json"), i % 2 == 0);
        engine.stop_timeline();
      }
    });
    for (int i = 0; i < 300; ++i) reduce(engine, "t" + std::to_string(i % 5), i % 50 == 0 ? 100'000 : 10);
    done = true;
    switcher.join();
  });
  for (const char* name : {"0.0.json", "0.1.json"}) EXPECT_FALSE(events_of(folder / name).empty());
}

}  // namespace
}  // namespace fusewire
