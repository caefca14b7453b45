// How the ranks of one host find each other: rank 0 listens, the others connect, everybody proves who it is.
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "common/error.h"
#include "common/logging.h"
#include "transport/segment.h"
#include "transport/socket.h"
#include "transport/unix_endpoint.h"

namespace fusewire {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr uint32_t kProtocolVersion = 1;
constexpr milliseconds kHelloTimeout{5000};  // for a connection to say who it is
constexpr milliseconds kRejectGrace{500};    // how long a leaf waits past its own timeout for rank 0's explanation
constexpr size_t kMaxStrangers = 64;         // connections that have not said who they are
constexpr int kMaxWarnings = 16;

// Rounded up, so that poll() never returns just before the deadline.
int milliseconds_until(Clock::time_point deadline) {
  const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<int64_t>(left, 0, 60'000));
}

std::string seconds(milliseconds time) {
  std::string text = std::to_string(static_cast<double>(time.count()) / 1000);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  return text + " s";
}

// The time it takes says nothing about where the first difference is.
bool same_secret(const std::string& a, const std::string& b) {
  unsigned difference = a.size() == b.size() ? 0 : 1;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    difference |= static_cast<unsigned char>(a[i]) ^ static_cast<unsigned char>(b[i]);
  }
  return difference == 0;
}

void check_secret(const std::string& secret) {
  if (secret.size() > kMaxSecretBytes) {
    throw Error(ErrorCode::kInvalidArgument,
                "the job's secret has more than " + std::to_string(kMaxSecretBytes) + " bytes");
  }
}

std::string list_ranks(const std::vector<int>& ranks) {
  constexpr size_t kShown = 16;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < std::min(ranks.size(), kShown); ++i) text += (i > 0 ? ", " : "") + std::to_string(ranks[i]);
  if (ranks.size() > kShown) text += " and " + std::to_string(ranks.size() - kShown) + " more";
  return text;
}

class Listener final : public UnixListener {
 public:
  Listener(int size, std::string secret)
      : size_(size), secret_(std::move(secret)), socket_(listen_abstract(size + 128, address_)) {}

  const std::string& address() const override { return address_; }
  std::unique_ptr<Endpoint> accept_all(milliseconds timeout) override;

 private:
  // Somebody who has connected; `rank` < 0 until a valid Hello has come.
  struct Visitor {
    Connection connection;
    Clock::time_point deadline;
    int rank = -1;
    bool gone = false;
  };

  void wait_for_events(Clock::time_point deadline);
  void accept_visitors();
  void read(Visitor& visitor);
  void greet(Visitor& visitor, const SocketFrame& frame);
  void drop(Visitor& visitor, const std::string& why);
  void reject(Visitor& visitor, ErrorCode code, const std::string& why);
  Visitor* joined(int rank);
  std::vector<int> missing();
  [[noreturn]] void give_up(milliseconds timeout);
  void warn(const std::string& text);

  const int size_;
  const std::string secret_;
  std::string address_;
  Descriptor socket_;
  std::vector<Visitor> visitors_;
  std::string last_rejection_;
  Logger log_{LogLevel::kWarning, 0};
  int warnings_ = 0;
};

void Listener::warn(const std::string& text) {
  if (++warnings_ > kMaxWarnings) return;
  log_.warning(text + (warnings_ == kMaxWarnings ? " (further ones are not logged)" : ""));
}

void Listener::drop(Visitor& visitor, const std::string& why) {
  if (visitor.rank >= 0) {
    last_rejection_ = "rank " + std::to_string(visitor.rank) + " came and left again: " + why;
    warn(last_rejection_);
  } else {
    warn("dropped a connection from pid " + std::to_string(visitor.connection.pid) + ": " + why);
  }
  visitor.gone = true;
}

void Listener::reject(Visitor& visitor, ErrorCode code, const std::string& why) {
  send_frame(visitor.connection.socket.get(), encode(Reject{.code = code, .text = why}));
  last_rejection_ = why;
  drop(visitor, why);
}

Listener::Visitor* Listener::joined(int rank) {
  for (Visitor& visitor : visitors_) {
    if (visitor.rank == rank && !visitor.gone) return &visitor;
  }
  return nullptr;
}

std::vector<int> Listener::missing() {
  std::vector<int> ranks;
  for (int rank = 1; rank < size_; ++rank) {
    if (joined(rank) == nullptr) ranks.push_back(rank);
  }
  return ranks;
}

void Listener::wait_for_events(Clock::time_point deadline) {
  std::vector<pollfd> polled{{.fd = socket_.get(), .events = POLLIN, .revents = 0}};
  for (const Visitor& visitor : visitors_) {
    polled.push_back({.fd = visitor.connection.socket.get(), .events = POLLIN, .revents = 0});
    if (visitor.rank < 0) deadline = std::min(deadline, visitor.deadline);
  }
  if (poll(polled.data(), polled.size(), milliseconds_until(deadline)) <= 0) return;
  for (size_t i = 0; i < visitors_.size(); ++i) {
    if (polled[i + 1].revents != 0) read(visitors_[i]);
  }
  if (polled[0].revents != 0) accept_visitors();
}

void Listener::accept_visitors() {
  for (;;) {
    Descriptor socket =
        Descriptor::make([&] { return accept4(socket_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK); });
    if (!socket) {
      if (errno == EAGAIN) return;
      if (errno == EINTR || errno == ECONNABORTED) continue;
      throw Error(ErrorCode::kInternal, std::string("cannot accept the other ranks: ") + std::strerror(errno));
    }
    const PeerCredentials who = credentials(socket.get());
    Visitor visitor;
    visitor.connection.socket = std::move(socket);
    visitor.connection.pid = who.pid;
    visitor.deadline = Clock::now() + kHelloTimeout;
    if (who.uid != geteuid()) {
      drop(visitor, "it belongs to user " + std::to_string(who.uid));
      continue;
    }
    // A crowd of strangers must not use up the descriptors: the one who has been silent longest goes.
    const auto silent = [](const Visitor& v) { return v.rank < 0 && !v.gone; };
    if (std::count_if(visitors_.begin(), visitors_.end(), silent) >= static_cast<ptrdiff_t>(kMaxStrangers)) {
      drop(*std::find_if(visitors_.begin(), visitors_.end(), silent), "too many connections say nothing");
      std::erase_if(visitors_, [](const Visitor& v) { return v.gone; });
    }
    visitors_.push_back(std::move(visitor));
  }
}

void Listener::read(Visitor& visitor) {
  SocketFrame frame;
  switch (visitor.connection.reader.read(visitor.connection.socket.get(), frame)) {
    case SocketReader::Result::kNothing:
      return;
    case SocketReader::Result::kFrame:
      return greet(visitor, frame);
    case SocketReader::Result::kMalformed:
      return drop(visitor, "malformed frame");
    case SocketReader::Result::kClosed:
      return drop(visitor, visitor.rank < 0 ? "it closed without saying who it is" : "its connection closed");
  }
}

void Listener::greet(Visitor& visitor, const SocketFrame& frame) {
  Hello hello;
  if (visitor.rank >= 0 || !decode(frame, hello)) return drop(visitor, "malformed frame");
  if (!same_secret(hello.secret, secret_)) {
    return reject(visitor, ErrorCode::kInvalidArgument, "it belongs to another job (wrong secret)");
  }
  const std::string name = "rank " + std::to_string(hello.rank);
  if (hello.version != kProtocolVersion) {
    return reject(visitor, ErrorCode::kInvalidArgument,
                  name + " speaks protocol version " + std::to_string(hello.version) + ", rank 0 speaks " +
                      std::to_string(kProtocolVersion) + ": do all ranks run the same build of Fusewire?");
  }
  if (hello.size != size_) {
    return reject(visitor, ErrorCode::kInvalidArgument,
                  name + " was started as one of " + std::to_string(hello.size) + " ranks, rank 0 as one of " +
                      std::to_string(size_));
  }
  if (hello.rank < 1 || hello.rank >= size_) {
    return reject(visitor, ErrorCode::kInvalidArgument, name + " is outside 1 to " + std::to_string(size_ - 1));
  }
  if (const Visitor* first = joined(hello.rank)) {
    return reject(visitor, ErrorCode::kInvalidArgument,
                  "two processes say they are " + name + ": pid " + std::to_string(first->connection.pid) +
                      ", which came first, and pid " + std::to_string(visitor.connection.pid));
  }
  visitor.rank = hello.rank;
}

void Listener::give_up(milliseconds timeout) {
  const std::vector<int> absent = missing();
  std::string text = list_ranks(absent) + " did not connect to rank 0 within " + seconds(timeout) + " (" +
                     std::to_string(size_) + " ranks expected)";
  if (!last_rejection_.empty()) text += "; meanwhile: " + last_rejection_;
  const int culprit = absent.size() == 1 ? absent.front() : -1;
  for (Visitor& visitor : visitors_) {
    if (visitor.rank >= 0) {
      send_frame(visitor.connection.socket.get(), encode(Reject{.code = ErrorCode::kPeerLost, .text = text}));
    }
  }
  visitors_.clear();
  throw Error(ErrorCode::kPeerLost, text, culprit);
}

std::unique_ptr<Endpoint> Listener::accept_all(milliseconds timeout) {
  if (!socket_) throw Error(ErrorCode::kInvalidArgument, "accept_all() was called twice");
  const Clock::time_point deadline = Clock::now() + timeout;
  Segment segment = Segment::create(size_);
  for (;;) {
    const bool complete = missing().empty();
    if (!complete && Clock::now() >= deadline) {
      socket_.close();
      give_up(timeout);
    }
    // When everybody has come, one more look without waiting: a rank that left before the last one came is not there.
    wait_for_events(complete ? Clock::now() : deadline);
    for (Visitor& visitor : visitors_) {
      if (visitor.rank < 0 && !visitor.gone && Clock::now() >= visitor.deadline) {
        drop(visitor, "it did not say who it is within " + seconds(kHelloTimeout));
      }
    }
    std::erase_if(visitors_, [](const Visitor& visitor) { return visitor.gone; });
    if (complete && missing().empty()) break;
  }
  socket_.close();
  const SocketFrame welcome = encode(segment.welcome());
  std::vector<Connection> connections;
  for (int rank = 1; rank < size_; ++rank) {
    connections.push_back(std::move(joined(rank)->connection));
    // A leaf that has just died is noticed by the endpoint's watcher, like one that dies later.
    send_frame(connections.back().socket.get(), welcome, segment.descriptor());
  }
  visitors_.clear();
  return std::make_unique<UnixEndpoint>(0, size_, std::move(segment), std::move(connections));
}

Descriptor connect_to(const std::string& address, milliseconds timeout) {
  sockaddr_un name{};
  socklen_t length = 0;
  abstract_name(address, name, length);
  Descriptor socket = Descriptor::make([] { return ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0); });
  if (!socket) throw Error(ErrorCode::kInternal, std::string("cannot make a Unix socket: ") + std::strerror(errno));
  // connect() waits while the queue of rank 0 is full, up to the send timeout (of which 0 would mean for ever).
  const int64_t wait = std::max<int64_t>(timeout.count(), 1);
  const timeval limit{.tv_sec = wait / 1000, .tv_usec = wait % 1000 * 1000};
  setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  int result = -1;
  do {
    result = connect(socket.get(), reinterpret_cast<const sockaddr*>(&name), length);
  } while (result != 0 && errno == EINTR);
  if (result != 0) {
    const std::string why = errno == ECONNREFUSED
                                ? "nobody listens at its address (it has ended, or runs in another network namespace)"
                            : errno == EAGAIN ? "it did not accept a connection within " + seconds(timeout)
                                              : std::strerror(errno);
    throw Error(ErrorCode::kPeerLost, "cannot connect to rank 0: " + why, 0);
  }
  return socket;
}

// The next frame; what rank 0 has to say may come a little after the deadline.
SocketFrame await_answer(Connection& connection, Descriptor& memory, Clock::time_point deadline, milliseconds timeout) {
  SocketFrame frame;
  for (;;) {
    switch (connection.reader.read(connection.socket.get(), frame, &memory)) {
      case SocketReader::Result::kFrame:
        return frame;
      case SocketReader::Result::kClosed:
        throw Error(ErrorCode::kPeerLost,
                    "rank 0 (pid " + std::to_string(connection.pid) + ") closed the connection before all ranks came",
                    0);
      case SocketReader::Result::kMalformed:
        throw Error(ErrorCode::kPeerLost, "rank 0 answered with a malformed frame", 0);
      case SocketReader::Result::kNothing:
        break;
    }
    if (Clock::now() >= deadline) {
      throw Error(ErrorCode::kPeerLost,
                  "rank 0 (pid " + std::to_string(connection.pid) + ") did not answer within " + seconds(timeout) +
                      ": it has stopped, or still waits for other ranks",
                  0);
    }
    pollfd polled{.fd = connection.socket.get(), .events = POLLIN, .revents = 0};
    poll(&polled, 1, milliseconds_until(deadline));
  }
}

}  // namespace

std::unique_ptr<UnixListener> listen_unix(int size, const std::string& secret) {
  if (size < 1) throw Error(ErrorCode::kInvalidArgument, "a job has at least one rank, not " + std::to_string(size));
  check_secret(secret);
  return std::make_unique<Listener>(size, secret);
}

std::unique_ptr<Endpoint> connect_unix(const std::string& address, int rank, int size, const std::string& secret,
                                       milliseconds timeout) {
  if (rank < 1 || rank >= size) {
    throw Error(ErrorCode::kInvalidArgument, "rank " + std::to_string(rank) + " of " + std::to_string(size) +
                                                 " cannot connect to rank 0; allowed: 1 to size - 1");
  }
  check_secret(secret);
  const Clock::time_point deadline = Clock::now() + timeout;
  Connection connection;
  connection.socket = connect_to(address, timeout);
  const PeerCredentials who = credentials(connection.socket.get());
  connection.pid = who.pid;
  if (who.uid != geteuid()) {
    throw Error(ErrorCode::kInvalidArgument,
                "rank 0 runs as user " + std::to_string(who.uid) + ", rank " + std::to_string(rank) + " as user " +
                    std::to_string(geteuid()),
                0);
  }
  const Hello hello{.version = kProtocolVersion, .rank = rank, .size = size, .secret = secret};
  if (!send_frame(connection.socket.get(), encode(hello))) {
    throw Error(ErrorCode::kPeerLost, std::string("cannot send to rank 0: ") + std::strerror(errno), 0);
  }
  Descriptor memory;
  const SocketFrame answer = await_answer(connection, memory, deadline + kRejectGrace, timeout);
  Reject reject;
  if (decode(answer, reject)) {
    const bool known = reject.code == ErrorCode::kInvalidArgument || reject.code == ErrorCode::kPeerLost;
    throw Error(known ? reject.code : ErrorCode::kPeerLost, "rank 0 says: " + reject.text);
  }
  Welcome welcome;
  if (!decode(answer, welcome)) throw Error(ErrorCode::kPeerLost, "rank 0 answered with a malformed frame", 0);
  std::vector<Connection> connections;
  connections.push_back(std::move(connection));
  return std::make_unique<UnixEndpoint>(rank, size, Segment::adopt(std::move(memory), size, welcome),
                                        std::move(connections));
}

}  // namespace fusewire
