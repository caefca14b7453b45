// Unix endpoints with ranks as real processes: traffic, deaths of every kind, and what forked children must not keep.
// Not in ThreadSanitizer builds: it does not support threads in a process forked from one that had threads.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <thread>

#include "transport_traffic.h"
#include "transport_unix.h"

#if defined(__SANITIZE_THREAD__)
TEST(UnixProcesses, NotUnderThreadSanitizer) {
  GTEST_SKIP() << "ThreadSanitizer cannot start threads after fork(); transport_unix_test has ranks as threads";
}
#else

namespace fusewire {
namespace {

using testing::Departures;
using testing::exchange_as_leaf;
using testing::exchange_as_root;
using testing::kPatience;
using testing::Pipe;
using testing::Process;
using testing::text_frame;

// Rank 0 here, the others as processes that run `leaf` with their endpoint.
struct Job {
  Job(int size, const std::function<int(Endpoint&)>& leaf) {
    auto listener = listen_unix(size, "s");
    const std::string address = listener->address();
    for (int rank = 1; rank < size; ++rank) {
      leaves.emplace_back([&, rank] {
        auto endpoint = connect_unix(address, rank, size, "s", kPatience);
        return leaf(*endpoint);
      });
    }
    root = listener->accept_all(kPatience);
  }
  Departures seen;  // outlives the endpoint that tells it
  std::vector<Process> leaves;
  std::unique_ptr<Endpoint> root;
};

TEST(UnixProcesses, TenThousandRandomFrames) {
  Job job(2, [](Endpoint& endpoint) {
    EXPECT_EQ(exchange_as_leaf(endpoint, 10000), "");
    endpoint.goodbye(true, "done");
    return 0;
  });
  EXPECT_EQ(exchange_as_root(*job.root, 10000), "");
  EXPECT_EQ(job.leaves[0].exit_code(), 0);
}

TEST(UnixProcesses, FourRanks) {
  Job job(4, [](Endpoint& endpoint) {
    EXPECT_EQ(exchange_as_leaf(endpoint, 500), "");
    endpoint.goodbye(true, "done");
    return 0;
  });
  EXPECT_EQ(exchange_as_root(*job.root, 500), "");
  for (Process& leaf : job.leaves) EXPECT_EQ(leaf.exit_code(), 0);
}

TEST(UnixProcesses, AKilledLeafIsNamedWithItsPid) {
  Job job(3, [](Endpoint& endpoint) {
    Departures seen;
    endpoint.watch(seen.callback());
    pause();
    return 0;
  });
  Departures& seen = job.seen;
  job.root->watch(seen.callback());
  job.leaves[1].send_signal(SIGKILL);
  const Departure departure = seen.at(0);
  EXPECT_EQ(departure.rank, 2);
  EXPECT_FALSE(departure.clean);
  EXPECT_NE(departure.reason.find("pid " + std::to_string(job.leaves[1].pid())), std::string::npos) << departure.reason;
  job.root->goodbye(true, "");
  EXPECT_EQ(seen.count(), 1u);
}

TEST(UnixProcesses, AKilledRootIsSeenByEveryLeaf) {
  // The root is a child here, so that this process, a leaf, can see it die.
  char name[128] = {};
  int channel[2];
  ASSERT_EQ(pipe(channel), 0);
  Process root([&] {
    auto listener = listen_unix(2, "s");
    const std::string& text = listener->address();
    EXPECT_EQ(write(channel[1], text.data(), text.size()), static_cast<ssize_t>(text.size()));
    auto endpoint = listener->accept_all(kPatience);
    pause();
    return 0;
  });
  ASSERT_GT(read(channel[0], name, sizeof name - 1), 0);
  close(channel[0]);
  close(channel[1]);
  Departures seen;
  auto leaf = connect_unix(name, 1, 2, "s", kPatience);
  leaf->watch(seen.callback());
  root.send_signal(SIGKILL);
  EXPECT_EQ(seen.at(0).rank, 0);
  EXPECT_FALSE(seen.at(0).clean);
  EXPECT_NE(seen.at(0).reason.find("pid " + std::to_string(root.pid())), std::string::npos) << seen.at(0).reason;
}

TEST(UnixProcesses, LastWordsArriveThoughTheProcessEndsAtOnce) {
  for (const bool clean : {true, false}) {
    Job job(2, [clean](Endpoint& endpoint) {
      endpoint.goodbye(clean, "ValueError: the loss is not a number");
      _exit(3);
      return 0;
    });
    EXPECT_EQ(job.leaves[0].exit_code(), 3);
    Departures& seen = job.seen;
    job.root->watch(seen.callback());
    EXPECT_EQ(seen.at(0).reason, "ValueError: the loss is not a number");
    EXPECT_EQ(seen.at(0).clean, clean);
  }
}

TEST(UnixProcesses, AStoppedLeafDoesNotHoldUpTheRootsGoodbye) {
  Job job(2, [](Endpoint&) {
    pause();
    return 0;
  });
  Departures& seen = job.seen;
  job.root->watch(seen.callback());
  job.leaves[0].send_signal(SIGSTOP);
  for (int i = 0; i < 100; ++i) job.root->send(1, std::vector<std::byte>(50000));
  job.root->goodbye(true, "");
  EXPECT_EQ(seen.count(), 0u);
}

// A DataLoader worker, forked from a rank that is then killed, lives on: the root must see the death although the
// worker is alive. The worker exits only after the root has seen it.
TEST(UnixProcesses, AKilledLeafIsSeenThoughItsForkedChildLives) {
  Pipe to_worker;
  Pipe from_worker;
  Job job(2, [&](Endpoint& endpoint) {
    Departures seen;
    endpoint.watch(seen.callback());
    const SharedMapping mapping = endpoint.map_shared(0, 4096);
    if (fork() != 0) {
      pause();
      return 0;
    }
    alarm(60);
    std::vector<std::byte> frame;
    endpoint.send(0, text_frame("from the worker"));
    EXPECT_FALSE(endpoint.receive(0, frame));
    EXPECT_FALSE(endpoint.has_incoming());
    endpoint.flush();
    endpoint.seat().ring();
    EXPECT_THROW(endpoint.map_shared(0, 64), Error);
    endpoint.goodbye(false, "from the worker");
    endpoint.abandon_after_fork();
    from_worker.tell(::testing::Test::HasFailure() ? 'f' : 'r');
    to_worker.hear();
    from_worker.tell('e');
    return 0;
  });
  Departures& seen = job.seen;
  job.root->watch(seen.callback());
  EXPECT_EQ(from_worker.hear(), 'r');
  std::vector<std::byte> frame;
  EXPECT_FALSE(job.root->receive(1, frame)) << "the worker has no way to the mailbox";
  EXPECT_EQ(seen.count(), 0u) << "the worker's goodbye is not the rank's";
  job.leaves[0].send_signal(SIGKILL);
  EXPECT_NE(seen.at(0).reason.find("closed without a goodbye"), std::string::npos) << seen.at(0).reason;
  to_worker.tell('x');
  EXPECT_EQ(from_worker.hear(), 'e') << "the worker was alive when the death was seen";
}

// What the child makes for itself is untouched by the end of what it inherited.
TEST(UnixProcesses, AForkedChildMayStartItsOwnJob) {
  Departures seen;
  auto inherited = testing::make_unix_job(3);
  for (auto& endpoint : inherited) endpoint->watch(seen.callback());
  SharedMapping mapping = inherited[1]->map_shared(0, 1 << 20);
  Process child([&] {
    Departures own_seen;
    auto own = testing::make_unix_job(3);
    own[0]->watch(own_seen.callback());
    const SharedMapping own_mapping = own[1]->map_shared(0, 1 << 20);
    inherited.clear();
    mapping = {};
    own_mapping.data[5] = std::byte{1};
    own[1]->send(0, text_frame("mine"));
    std::vector<std::byte> frame;
    EXPECT_TRUE(own[0]->receive(1, frame));
    own[2]->goodbye(true, "mine too");
    EXPECT_EQ(own_seen.at(0).reason, "mine too");
    return 0;
  });
  EXPECT_EQ(child.exit_code(), 0);
  EXPECT_EQ(seen.count(), 0u);
  inherited[1]->send(0, text_frame("still works"));
  std::vector<std::byte> frame;
  EXPECT_TRUE(inherited[0]->receive(1, frame));
}

// A limit on file sizes holds for a memfd too; exceeding it would kill the process by SIGXFSZ.
TEST(UnixProcesses, ALimitOnFileSizes) {
  for (const auto& [limit, enough] : {std::pair(rlim_t{1} << 30, true), std::pair(rlim_t{1} << 20, false)}) {
    Process child([&, limit = limit, enough = enough] {
      const rlimit sizes{limit, limit};
      EXPECT_EQ(setrlimit(RLIMIT_FSIZE, &sizes), 0);
      if (enough) {
        auto endpoints = testing::make_unix_job(2);
        const SharedMapping mapping = endpoints[1]->map_shared(512 << 20, 4096);
        mapping.data[4095] = std::byte{1};
      } else {
        const Error error = testing::error_of([] { listen_unix(2, "s")->accept_all(kPatience); });
        EXPECT_NE(std::string(error.what()).find("ulimit -f"), std::string::npos) << error.what();
      }
      return 0;
    });
    EXPECT_EQ(child.exit_code(), 0);
  }
}

// Threads keep forking while jobs come and go: no child holds a descriptor of a job, whenever it was born.
TEST(UnixProcesses, ForksDuringRendezvous) {
  const auto count = [] {  // usable after fork(): no allocation, no directory
    int open = 0;
    for (int fd = 0; fd < 1024; ++fd) open += fcntl(fd, F_GETFD) >= 0 ? 1 : 0;
    return open;
  };
  const int before = count();
  std::atomic<bool> stop{false};
  std::atomic<int> children{0};
  std::thread forker([&] {
    while (!stop) {
      const pid_t pid = fork();
      if (pid == 0) {
        _exit(count() == before ? 0 : 1);
      }
      int status = 0;
      waitpid(pid, &status, 0);
      EXPECT_EQ(status, 0) << "a child has a descriptor of its parent's job";
      ++children;
    }
  });
  for (int round = 0; round < 30 || children < 30; ++round) {
    Departures seen;
    auto endpoints = testing::make_unix_job(3);
    for (auto& endpoint : endpoints) endpoint->watch(seen.callback());
    for (auto& endpoint : endpoints) endpoint->goodbye(true, "");
  }
  stop = true;
  forker.join();
}

}  // namespace
}  // namespace fusewire
#endif
