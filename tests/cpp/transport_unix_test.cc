// Unix endpoints with all ranks in one process, so that every sanitizer sees them: traffic, goodbyes, crashes, rogues,
// shared memory, what is left behind. transport_process_test.cc has ranks as real processes.
#include "transport_unix.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/socket.h>

#include <thread>

#include "transport/segment.h"
#include "transport/socket.h"
#include "transport_traffic.h"

namespace fusewire {
namespace {

using testing::Departures;
using testing::error_of;
using testing::exchange_as_leaf;
using testing::exchange_as_root;
using testing::kPatience;
using testing::make_unix_job;
using testing::text_frame;

TEST(UnixEndpoint, RandomFramesBothWays) {
  auto endpoints = make_unix_job(4);
  std::vector<std::thread> threads;
  for (int rank = 1; rank < 4; ++rank) {
    threads.emplace_back([&, rank] { EXPECT_EQ(exchange_as_leaf(*endpoints[rank], 500), ""); });
  }
  EXPECT_EQ(exchange_as_root(*endpoints[0], 500), "");
  for (auto& thread : threads) thread.join();
}

TEST(UnixEndpoint, GoodbyesCarryTheirWords) {
  Departures seen[4];
  auto endpoints = make_unix_job(4);
  for (int rank = 0; rank < 4; ++rank) endpoints[rank]->watch(seen[rank].callback());
  endpoints[2]->send(0, text_frame("last words"));
  endpoints[2]->goodbye(true, "finished");
  endpoints[2]->goodbye(false, "again");
  EXPECT_EQ(seen[0].at(0).rank, 2);
  EXPECT_TRUE(seen[0].at(0).clean);
  EXPECT_EQ(seen[0].at(0).reason, "finished");
  std::vector<std::byte> frame;
  ASSERT_TRUE(endpoints[0]->receive(2, frame)) << "what was sent before the goodbye is not lost";
  EXPECT_EQ(frame, text_frame("last words"));
  endpoints[0]->send(2, text_frame("to nobody"));
  EXPECT_THROW(endpoints[2]->map_shared(0, 64), Error);

  endpoints[3]->goodbye(false, std::string(100000, 'x'));
  EXPECT_EQ(seen[0].at(1).rank, 3);
  EXPECT_FALSE(seen[0].at(1).clean);
  EXPECT_EQ(seen[0].at(1).reason, std::string(kMaxReasonBytes, 'x'));

  endpoints[0]->goodbye(false, "the root has had enough");
  EXPECT_EQ(seen[1].at(0).rank, 0);
  EXPECT_EQ(seen[1].at(0).reason, "the root has had enough");
  endpoints[1]->goodbye(true, "");
  EXPECT_EQ(seen[0].count(), 2u) << "nothing is delivered after one's own goodbye";
  EXPECT_EQ(seen[1].count(), 1u);
}

TEST(UnixEndpoint, DestructionLooksLikeACrashAlsoToALateWatcher) {
  Departures seen;
  auto endpoints = make_unix_job(2);
  endpoints[1].reset();
  endpoints[0]->watch(seen.callback());
  const Departure departure = seen.at(0);
  EXPECT_EQ(departure.rank, 1);
  EXPECT_FALSE(departure.clean);
  EXPECT_EQ(departure.reason,
            "its connection closed without a goodbye (killed? pid " + std::to_string(getpid()) + ", exit not seen)");
  EXPECT_THROW(endpoints[0]->watch(seen.callback()), Error);
}

TEST(UnixEndpoint, ASleepingDriverWakesWhenItsPeerLeaves) {
  std::atomic<bool> gone{false};
  auto endpoints = make_unix_job(2);
  endpoints[0]->watch([&](const Departure&) { gone = true; });
  std::thread sleeper([&] {
    testing::SeatedDriver driver(*endpoints[0], 0);
    while (!gone) driver.idle();
  });
  endpoints[1]->goodbye(false, "crash");
  sleeper.join();
}

TEST(UnixEndpoint, AllLeaveAtOnce) {
  for (int round = 0; round < 20; ++round) {
    auto endpoints = make_unix_job(3);
    std::vector<std::thread> threads;
    for (auto& endpoint : endpoints) {
      threads.emplace_back([&endpoint] {
        auto alive = std::make_unique<std::atomic<bool>>(true);
        endpoint->watch([&flag = *alive](const Departure& departure) {
          EXPECT_TRUE(departure.clean) << departure.reason;
          EXPECT_TRUE(flag.load());
        });
        endpoint->goodbye(true, "bye");
        alive->store(false);
        alive.reset();
        endpoint.reset();
      });
    }
    for (auto& thread : threads) thread.join();
  }
}

TEST(UnixEndpoint, SharedMemory) {
  auto endpoints = make_unix_job(3);
  const uint64_t far = 100ULL << 30;
  const SharedMapping a = endpoints[0]->map_shared(far + 24, 100000);
  const SharedMapping b = endpoints[2]->map_shared(far + 24, 100000);
  const SharedMapping other = endpoints[1]->map_shared(0, 8192);
  for (size_t i = 0; i < a.size; ++i) ASSERT_EQ(a.data[i], std::byte{0});
  a.data[0] = std::byte{3};
  a.data[99999] = std::byte{7};
  EXPECT_EQ(b.data[0], std::byte{3});
  EXPECT_EQ(b.data[99999], std::byte{7});
  EXPECT_EQ(other.data[0], std::byte{0});
  EXPECT_EQ(error_of([&] { endpoints[1]->map_shared(1ULL << 50, 8); }).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(error_of([&] { endpoints[1]->map_shared(8, SIZE_MAX); }).code(), ErrorCode::kInvalidArgument);
  endpoints.clear();
  EXPECT_EQ(b.data[99999], std::byte{7}) << "a mapping outlives its endpoint";
}

TEST(UnixEndpoint, NothingIsLeftBehind) {
  make_unix_job(3).clear();  // lazy descriptors and threads of the test itself
  const int descriptors = testing::open_descriptors();
  const int threads = testing::running_threads();
  for (int round = 0; round < 3; ++round) {
    Departures seen;
    auto endpoints = make_unix_job(4);
    for (auto& endpoint : endpoints) endpoint->watch(seen.callback());
    const SharedMapping mapping = endpoints[1]->map_shared(0, 1 << 20);
    if (round == 1) {
      for (auto& endpoint : endpoints) endpoint->goodbye(true, "");
    }
  }
  EXPECT_EQ(testing::open_descriptors(), descriptors);
  EXPECT_EQ(testing::running_threads(), threads);
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    EXPECT_EQ(entry.path().filename().string().find("fusewire"), std::string::npos);
  }
}

TEST(UnixEndpoint, OneRankAlone) {
  auto endpoints = make_unix_job(1);
  endpoints[0]->watch([](const Departure&) { FAIL(); });
  endpoints[0]->flush();
  EXPECT_FALSE(endpoints[0]->has_incoming());
  EXPECT_EQ(endpoints[0]->map_shared(0, 64).size, 64u);
  endpoints[0]->goodbye(true, "");
}

// A leaf that knows the secret and the format, and then breaks the rules.
class Rogue {
 public:
  Rogue(const std::string& address, int size) : size_(size) {
    sockaddr_un name{};
    socklen_t length = 0;
    abstract_name(address, name, length);
    connection_ = Descriptor::make([] { return ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0); });
    EXPECT_EQ(connect(connection_.get(), reinterpret_cast<const sockaddr*>(&name), length), 0);
  }
  int socket() const { return connection_.get(); }
  void hello(int rank, const std::string& secret) const {
    EXPECT_TRUE(send_frame(socket(), encode(Hello{.version = 1, .rank = rank, .size = size_, .secret = secret})));
  }
  void raw(const std::string& bytes) const {
    EXPECT_EQ(send(socket(), bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
  }
  SocketFrame await_frame(Descriptor* passed) {
    SocketFrame frame;
    while (reader_.read(socket(), frame, passed) == SocketReader::Result::kNothing) std::this_thread::yield();
    return frame;
  }

 private:
  int size_;
  Descriptor connection_;
  SocketReader reader_;
};

struct RogueJob {
  RogueJob() {
    auto accepted = std::async(std::launch::async, [&] { return listener->accept_all(kPatience); });
    rogue.hello(1, "s");
    Descriptor memory;
    Welcome welcome;
    EXPECT_TRUE(decode(rogue.await_frame(&memory), welcome));
    segment.emplace(Segment::adopt(std::move(memory), 2, welcome));
    root = accepted.get();
    root->watch(seen.callback());
  }
  std::unique_ptr<UnixListener> listener = listen_unix(2, "s");
  Rogue rogue{listener->address(), 2};
  std::optional<Segment> segment;
  Departures seen;  // outlives the endpoint that tells it
  std::unique_ptr<Endpoint> root;
};

TEST(UnixEndpoint, RubbishInTheMailboxIsADeparture) {
  RogueJob job;
  RingMemory* ring = job.segment->star().up(1);
  std::memset(ring->bytes, 0xff, 64);
  ring->tail.store(64);
  std::vector<std::byte> frame;
  EXPECT_TRUE(job.root->has_incoming());
  EXPECT_FALSE(job.root->receive(1, frame));
  EXPECT_EQ(job.seen.at(0).rank, 1);
  EXPECT_FALSE(job.seen.at(0).clean);
  EXPECT_NE(job.seen.at(0).reason.find("malformed frame"), std::string::npos) << job.seen.at(0).reason;
  EXPECT_FALSE(job.root->has_incoming());
  EXPECT_FALSE(job.root->receive(1, frame));
  job.root->send(1, text_frame("dropped"));
  Goodbye goodbye;
  EXPECT_TRUE(decode(job.rogue.await_frame(nullptr), goodbye)) << "the rogue is told why";
  EXPECT_NE(goodbye.reason.find("malformed frame"), std::string::npos);
  job.root->goodbye(true, "");
  EXPECT_EQ(job.seen.count(), 1u);
}

TEST(UnixEndpoint, RubbishOnTheSocketIsADeparture) {
  for (const std::string& bytes : {std::string(100, 'z'), std::string("1RWF\4\0\0\0\377\377\377\377", 12),
                                   std::string("1RWF\1\0\0\0\0\0\0\0", 12)}) {
    RogueJob job;
    job.rogue.raw(bytes);
    EXPECT_NE(job.seen.at(0).reason.find("malformed frame"), std::string::npos) << job.seen.at(0).reason;
    EXPECT_FALSE(job.seen.at(0).clean);
  }
}

TEST(UnixEndpoint, AHeadThatLiesIsADeparture) {
  RogueJob job;
  job.segment->star().down(1)->head.store(1ULL << 40);
  const std::vector<std::byte> frame(3 * kRingBytes);
  job.root->send(1, frame);
  EXPECT_NE(job.seen.at(0).reason.find("malformed frame"), std::string::npos) << job.seen.at(0).reason;
}

TEST(UnixRendezvous, StrangersHarmNobody) {
  ::testing::internal::CaptureStderr();
  auto listener = listen_unix(3, "right");
  Rogue silent(listener->address(), 3);
  Rogue garbage(listener->address(), 3);
  garbage.raw(std::string(5000, 'g'));
  Rogue huge(listener->address(), 3);
  huge.raw(std::string("1RWF\1\0\0\0\377\377\0\0", 12));
  Rogue half(listener->address(), 3);
  half.raw("1RW");
  {
    const Rogue leaves_at_once(listener->address(), 3);
  }
  const auto join = [&](int rank, const std::string& secret) {
    return std::async(std::launch::async,
                      [&, rank, secret] { return connect_unix(listener->address(), rank, 3, secret, kPatience); });
  };
  auto wrong = join(1, "wrong");
  auto accepted = std::async(std::launch::async, [&] { return listener->accept_all(kPatience); });
  const Error refused = error_of([&] { wrong.get(); });
  EXPECT_EQ(refused.code(), ErrorCode::kInvalidArgument);
  EXPECT_NE(std::string(refused.what()).find("another job"), std::string::npos) << refused.what();
  auto first = join(1, "right");
  auto second = join(2, "right");
  auto root = accepted.get();
  auto leaf1 = first.get();
  auto leaf2 = second.get();
  leaf2->send(0, text_frame("here"));
  std::vector<std::byte> frame;
  ASSERT_TRUE(root->receive(2, frame));
  EXPECT_EQ(frame, text_frame("here"));
  const std::string log = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(log.find("malformed frame"), std::string::npos) << log;
  EXPECT_NE(log.find("another job"), std::string::npos) << log;
  EXPECT_NE(log.find("without saying who it is"), std::string::npos) << log;
}

TEST(UnixRendezvous, TheSecondOfTwoEqualRanksIsRefused) {
  auto listener = listen_unix(3, "s");
  auto accepted = std::async(std::launch::async, [&] { return listener->accept_all(kPatience); });
  std::vector<std::future<std::unique_ptr<Endpoint>>> twins;
  for (int i = 0; i < 2; ++i) {
    twins.push_back(
        std::async(std::launch::async, [&] { return connect_unix(listener->address(), 1, 3, "s", kPatience); }));
  }
  // One of the twins fails at once; the other waits for rank 2.
  while (twins[0].wait_for(std::chrono::milliseconds(1)) != std::future_status::ready &&
         twins[1].wait_for(std::chrono::milliseconds(1)) != std::future_status::ready) {
  }
  const size_t loser = twins[0].wait_for(std::chrono::seconds(0)) == std::future_status::ready ? 0 : 1;
  const Error error = error_of([&] { twins[loser].get(); });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_NE(std::string(error.what()).find("two processes say they are rank 1"), std::string::npos) << error.what();
  auto last = connect_unix(listener->address(), 2, 3, "s", kPatience);
  EXPECT_EQ(twins[1 - loser].get()->rank(), 1);
  EXPECT_EQ(accepted.get()->size(), 3);
}

TEST(UnixRendezvous, ARankThatDiesWhileOthersAreAwaitedMayComeAgain) {
  auto listener = listen_unix(3, "s");
  auto accepted = std::async(std::launch::async, [&] { return listener->accept_all(kPatience); });
  {
    const Rogue first_try(listener->address(), 3);
    first_try.hello(1, "s");
  }
  auto one = std::async(std::launch::async, [&] {
    for (;;) {
      try {
        return connect_unix(listener->address(), 1, 3, "s", kPatience);
      } catch (const Error& error) {  // rank 0 has not yet seen the end of the first
        if (error.code() != ErrorCode::kInvalidArgument) throw;
      }
    }
  });
  auto two = std::async(std::launch::async, [&] { return connect_unix(listener->address(), 2, 3, "s", kPatience); });
  EXPECT_EQ(accepted.get()->rank(), 0);
  EXPECT_EQ(one.get()->rank(), 1);
  EXPECT_EQ(two.get()->rank(), 2);
}

TEST(UnixRendezvous, AnotherSizeIsRefused) {
  auto listener = listen_unix(2, "s");
  auto accepted = std::async(std::launch::async, [&] { return listener->accept_all(kPatience); });
  const Error error = error_of([&] { connect_unix(listener->address(), 1, 4, "s", kPatience); });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_NE(std::string(error.what()).find("one of 4 ranks, rank 0 as one of 2"), std::string::npos) << error.what();
  auto right = connect_unix(listener->address(), 1, 2, "s", kPatience);
  EXPECT_EQ(accepted.get()->size(), 2);
}

TEST(UnixRendezvous, BothSidesAreToldWhoDidNotCome) {
  auto listener = listen_unix(4, "s");
  Rogue waiting(listener->address(), 4);
  waiting.hello(2, "s");
  const Error error = error_of([&] { listener->accept_all(std::chrono::milliseconds(200)); });
  EXPECT_EQ(error.code(), ErrorCode::kPeerLost);
  EXPECT_EQ(error.rank(), -1);
  EXPECT_NE(std::string(error.what()).find("ranks 1, 3 did not connect to rank 0 within 0.2 s"), std::string::npos)
      << error.what();
  Reject reject;
  ASSERT_TRUE(decode(waiting.await_frame(nullptr), reject));
  EXPECT_EQ(reject.code, ErrorCode::kPeerLost);
  EXPECT_EQ(reject.text, error.what());
  EXPECT_EQ(error_of([&] { listener->accept_all(std::chrono::milliseconds(1)); }).code(), ErrorCode::kInvalidArgument);
}

// What a leaf raises when the root answers its Hello with `answer` (and, perhaps, a descriptor).
Error leaf_error(const std::function<void(int socket)>& answer) {
  std::string address;
  const Descriptor listening = listen_abstract(4, address);
  auto leaf =
      std::async(std::launch::async, [&] { return error_of([&] { connect_unix(address, 1, 2, "s", kPatience); }); });
  Descriptor socket;
  while (!socket) {
    std::this_thread::yield();
    socket = Descriptor::make([&] { return accept4(listening.get(), nullptr, nullptr, SOCK_CLOEXEC); });
  }
  SocketReader reader;
  SocketFrame frame;
  while (reader.read(socket.get(), frame) == SocketReader::Result::kNothing) std::this_thread::yield();
  Hello hello;
  EXPECT_TRUE(decode(frame, hello));
  EXPECT_EQ(hello.rank, 1);
  answer(socket.get());
  socket.close();
  return leaf.get();
}

TEST(UnixRendezvous, ALeafDoesNotTrustItsRoot) {
  Error error = leaf_error([](int socket) {
    send_frame(socket, encode(Reject{.code = ErrorCode::kPeerLost, .text = "rank 3 did not connect"}));
  });
  EXPECT_EQ(error.code(), ErrorCode::kPeerLost);
  EXPECT_EQ(std::string(error.what()), "rank 0 says: rank 3 did not connect");

  error = leaf_error([](int) {});
  EXPECT_NE(std::string(error.what()).find("closed the connection before all ranks came"), std::string::npos);

  error = leaf_error([](int socket) { send(socket, "rubbish rubbish", 15, MSG_NOSIGNAL); });
  EXPECT_NE(std::string(error.what()).find("malformed frame"), std::string::npos);

  error = leaf_error([](int socket) { send_frame(socket, encode(Goodbye{.clean = true, .reason = ""})); });
  EXPECT_NE(std::string(error.what()).find("malformed frame"), std::string::npos);

  const Segment good = Segment::create(2);
  error = leaf_error([&](int socket) { send_frame(socket, encode(good.welcome())); });
  EXPECT_NE(std::string(error.what()).find("did not arrive"), std::string::npos) << error.what();

  error = leaf_error([&](int socket) {
    Welcome lie = good.welcome();
    lie.control_bytes += 4096;
    send_frame(socket, encode(lie), good.descriptor());
  });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
  EXPECT_NE(std::string(error.what()).find("another layout"), std::string::npos) << error.what();

  // Not sealed: the root could shrink it and every access would be a SIGBUS.
  const Descriptor loose = Descriptor::make([] { return memfd_create("loose", MFD_CLOEXEC); });
  ASSERT_EQ(ftruncate(loose.get(), static_cast<off_t>(good.welcome().total_bytes)), 0);
  error = leaf_error([&](int socket) { send_frame(socket, encode(good.welcome()), loose.get()); });
  EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
}

TEST(UnixRendezvous, OneMissingRankIsTheErrorsRank) {
  auto listener = listen_unix(2, "s");
  const Error error = error_of([&] { listener->accept_all(std::chrono::milliseconds(20)); });
  EXPECT_EQ(error.rank(), 1);
  EXPECT_NE(std::string(error.what()).find("rank 1 did not connect"), std::string::npos) << error.what();
}

TEST(UnixRendezvous, ALeafNoticesThatRankZeroIsNotThere) {
  std::string address;
  {
    auto listener = listen_unix(2, "s");
    address = listener->address();
  }
  Error error = error_of([&] { connect_unix(address, 1, 2, "s", kPatience); });
  EXPECT_EQ(error.code(), ErrorCode::kPeerLost);
  EXPECT_EQ(error.rank(), 0);

  auto listener = listen_unix(2, "s");  // listens, but never accepts
  error = error_of([&] { connect_unix(listener->address(), 1, 2, "s", std::chrono::milliseconds(50)); });
  EXPECT_EQ(error.code(), ErrorCode::kPeerLost);
  EXPECT_NE(std::string(error.what()).find("did not answer within 0.05 s"), std::string::npos) << error.what();

  EXPECT_EQ(error_of([&] { connect_unix(std::string(200, 'a'), 1, 2, "s", kPatience); }).code(),
            ErrorCode::kInvalidArgument);
  EXPECT_EQ(error_of([&] { connect_unix("", 1, 2, "s", kPatience); }).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(error_of([&] { connect_unix("x", 0, 2, "s", kPatience); }).code(), ErrorCode::kInvalidArgument);
  EXPECT_EQ(error_of([&] { connect_unix("x", 2, 2, "s", kPatience); }).code(), ErrorCode::kInvalidArgument);
}

TEST(UnixRendezvous, AddressesAreNeverTheSame) {
  EXPECT_NE(listen_unix(2, "s")->address(), listen_unix(2, "s")->address());
}

}  // namespace
}  // namespace fusewire
