// What the MPI plane does where MPI, or a peer, does not: silence, errors, thread levels, who finalises.
#include <gtest/gtest.h>

#include <barrier>
#include <deque>
#include <future>
#include <mutex>
#include <vector>

#include "common/error.h"
#include "mpi_world.h"
#include "signalled.h"
#include "thread_ranks.h"

namespace fusewire::testing {
namespace {

using std::chrono::milliseconds;

// Memory that stays until the program ends: what a rank has sent and given up lies there until its MPI has passed it
// on, however late (Note [Abandoned messages]).
std::vector<float>& lasting(size_t count) {
  static std::mutex mutex;
  static std::deque<std::vector<float>> all;
  const std::lock_guard lock(mutex);
  return all.emplace_back(count, 1.0f);
}

// Sums `values` of all ranks; large enough for two rounds of messages.
struct Sum {
  explicit Sum(size_t count = 40000) : values(lasting(count)) {
    const TensorView view = contiguous_view(values.data(), DataType::kFloat32, {static_cast<int64_t>(count)});
    bucket.elements = static_cast<int64_t>(count);
    bucket.segments.push_back({view, view});
  }
  std::vector<float>& values;
  Bucket bucket;
};

ErrorCode code_of(const std::function<void()>& call) { return error_of(call).code(); }

TEST(MpiFailure, AbortEndsAWaitForAPeerThatIsGone) {
  MpiWorld world(3);
  std::barrier started(3);
  const auto faults = world.on_ranks([&](int rank, MpiRank& self) -> std::string {
    world.start(rank, self);
    started.arrive_and_wait();
    if (rank == 1) {  // never takes part; ends the others when they wait for it
      Backend& other = *world.ranks[0]->backend;
      while (other.laggards() != std::vector<int>{1}) std::this_thread::yield();
      self.backend->abort();
      return code_of([&] { self.backend->run(Sum().bucket); }) == ErrorCode::kPeerLost ? "" : "ran after abort()";
    }
    const Error error = error_of([&] { self.backend->run(Sum().bucket); });
    if (error.code() != ErrorCode::kPeerLost) return std::string("another error: ") + error.what();
    if (self.mpi.open_requests() != 0) return "requests are left";
    return self.process.finish(milliseconds(0)) || self.mpi.is_finalized ? "finalised in spite of lost messages" : "";
  });
  EXPECT_EQ(faults, std::vector<std::string>(3));
}

TEST(MpiFailure, AWaitThatLastsTooLongNamesTheRank) {
  MpiWorld world(2);
  MpiOptions options;
  options.abort_after = milliseconds(50);
  const auto fault = world.with_backends(options, [&](int rank, Backend& backend) -> std::string {
    if (rank == 1) return "";
    const Error error = error_of([&] { backend.run(Sum().bucket); });
    return error.code() == ErrorCode::kStalled && error.rank() == 1 ? "" : error.what();
  });
  EXPECT_EQ(fault, "");
  EXPECT_TRUE(StopWord(world.stop).stopped());
}

// What the handler of a signal throws ends the wait, and the plane on all ranks; one that returns changes nothing.
TEST(MpiFailure, ASignalMayEndAWait) {
  for (const bool throws : {false, true}) {
    MpiWorld world(2);
    std::atomic<int> asked{0};
    std::atomic<bool> over{false};
    const std::function<void()> on_signal = [&] {
      ++asked;
      if (throws) throw Error(ErrorCode::kPeerLost, "interrupted", 0);
    };
    std::promise<pthread_t> waiter;
    const auto fault = world.with_backends({}, [&](int rank, Backend& backend) -> std::string {
      Sum sum;
      if (rank == 0) {
        sum.bucket.on_signal = &on_signal;
        waiter.set_value(pthread_self());
      } else {
        signal_until(waiter.get_future().get(), [&] { return asked > 0; });
        while (throws && !over) std::this_thread::yield();
      }
      if (!throws) {
        backend.run(sum.bucket);
        return "";
      }
      const ErrorCode code = code_of([&] { backend.run(sum.bucket); });
      over = true;
      return code == ErrorCode::kPeerLost ? "" : "another error";
    });
    EXPECT_EQ(fault, "");
  }
}

TEST(MpiFailure, AnErrorOfMpiReachesEveryRank) {
  for (const char* call : {"MPI_Isend", "MPI_Irecv", "MPI_Testsome"}) {
    MpiWorld world(3);
    std::barrier done(3);  // an error ends whatever its rank's peers are still in
    const auto fault = world.with_backends({}, [&](int rank, Backend& backend) -> std::string {
      backend.run(Sum().bucket);
      done.arrive_and_wait();
      if (rank == 2) world.ranks[2]->mpi.fails = call;
      const Error error = error_of([&] { backend.run(Sum().bucket); });
      if (error.code() != ErrorCode::kCollective) return std::string("another error: ") + error.what();
      if (rank == 2 && std::string(error.what()).find("double error 17") == std::string::npos) return error.what();
      return error.rank() == 2 || rank == 2 ? "" : "it names rank " + std::to_string(error.rank());
    });
    EXPECT_EQ(fault, "") << call;
  }
}

TEST(MpiFailure, ABadBucketStopsTheOthersToo) {
  MpiWorld world(2);
  const auto fault = world.with_backends({}, [&](int rank, Backend& backend) -> std::string {
    Sum sum;
    if (rank == 0) sum.bucket.elements = 1;
    const ErrorCode code = code_of([&] { backend.run(sum.bucket); });
    return code == ErrorCode::kInternal ? "" : std::string(to_string(code));
  });
  EXPECT_EQ(fault, "");
}

// ---- threads, and whose MPI it is ----

TEST(MpiThreadsTest, BelowMultipleOneThreadMakesEveryCall) {
  for (const MpiThreads level : {MpiThreads::kSingle, MpiThreads::kFunneled, MpiThreads::kSerialized}) {
    MpiWorld world(2, [&](MpiDouble& mpi) { mpi.level = level; });
    const auto faults = world.on_ranks([&](int rank, MpiRank& self) -> std::string {
      world.start(rank, self);
      for (int i = 0; i < 3; ++i) {
        Sum sum;
        std::thread([&] { self.backend->run(sum.bucket); }).join();  // buckets come from many threads
        if (sum.values[7] != 2.0f) return "wrong sum";
      }
      self.backend.reset();
      self.job.reset();
      if (!self.process.finish(milliseconds(10000)) || !self.mpi.is_finalized) return "not finalised";
      if (self.mpi.threads.size() != 1) return std::to_string(self.mpi.threads.size()) + " threads called MPI";
      return self.mpi.threads.count(std::this_thread::get_id()) == 0 ? "" : "the caller's own thread called MPI";
    });
    EXPECT_EQ(faults, std::vector<std::string>(2)) << to_string(level);
  }
}

TEST(MpiThreadsTest, WithMultipleTheCallerCallsMpiItself) {
  MpiWorld world(2);
  const auto fault = world.with_backends({}, [&](int rank, Backend& backend) -> std::string {
    MpiDouble& mpi = world.ranks[static_cast<size_t>(rank)]->mpi;
    mpi.threads.clear();
    backend.run(Sum().bucket);
    return mpi.threads == std::set<std::thread::id>{std::this_thread::get_id()} ? "" : "another thread called";
  });
  EXPECT_EQ(fault, "");
}

TEST(MpiThreadsTest, AnMpiOfSomebodyElseIsSharedAndNeverFinalised) {
  MpiWorld world(2, [](MpiDouble& mpi) { mpi.is_initialized = true; });
  const auto faults = world.on_ranks([&](int rank, MpiRank& self) -> std::string {
    world.start(rank, self);
    self.backend->run(Sum().bucket);
    self.backend.reset();
    self.job.reset();
    if (self.process.finish(milliseconds(1000)) || self.mpi.is_finalized) return "finalised under the user";
    const auto& calls = self.mpi.calls;
    return std::count(calls.begin(), calls.end(), "MPI_Init_thread") == 0 ? "" : "initialised again";
  });
  EXPECT_EQ(faults, std::vector<std::string>(2));
}

TEST(MpiThreadsTest, AnMpiForItsMainThreadAloneIsRefused) {
  MpiWorld world(1, [](MpiDouble& mpi) {
    mpi.is_initialized = true;
    mpi.level = MpiThreads::kFunneled;
  });
  const Error error = error_of([&] { world.start(0, *world.ranks[0]); });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_NE(std::string(error.what()).find("MPI_THREAD_FUNNELED"), std::string::npos) << error.what();
}

TEST(MpiThreadsTest, AFinalisedMpiIsRefused) {
  MpiWorld world(1, [](MpiDouble& mpi) { mpi.is_initialized = mpi.is_finalized = true; });
  EXPECT_EQ(code_of([&] { world.start(0, *world.ranks[0]); }), ErrorCode::kInvalidArgument);
}

TEST(MpiThreadsTest, AFinalizeThatHangsIsNotWaitedFor) {
  std::atomic<bool> release{false};
  MpiWorld world(1);
  world.ranks[0]->mpi.on_finalize = [&] {
    while (!release) std::this_thread::yield();
  };
  world.start(0, *world.ranks[0]);
  EXPECT_FALSE(world.ranks[0]->process.finish(milliseconds(20)));
  release = true;
}

// ---- the job ----

TEST(MpiJobFailure, AnotherNumberOfRanksIsRefused) {
  MpiWorld world(1);
  const Error error = error_of([&] { world.ranks[0]->join(0, 4); });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  for (const char* part : {"1 rank(s)", "4", "mpirun", "Double MPI 1.0"}) {
    EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
  }
}

TEST(MpiJobFailure, OthersThatDoNotStartTheirMpiAreAStall) {
  MpiWorld world(2);
  const Error error = error_of([&] { world.ranks[0]->join(0, 2, milliseconds(30)); });
  EXPECT_EQ(error.code(), ErrorCode::kStalled);
  EXPECT_FALSE(world.ranks[0]->process.finish(milliseconds(0)));
}

TEST(MpiJobFailure, TheCommunicatorIsFreedOnceAllIsWell) {
  MpiWorld world(2);
  const auto fault = world.with_backends({}, [](int, Backend& backend) -> std::string {
    backend.run(Sum(10).bucket);
    return "";
  });
  EXPECT_EQ(fault, "");
  for (const auto& rank : world.ranks) {
    rank->backend.reset();
    rank->job.reset();
    EXPECT_EQ(rank->mpi.calls.back(), "MPI_Comm_free");
  }
}

}  // namespace
}  // namespace fusewire::testing
