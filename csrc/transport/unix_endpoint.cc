#include "transport/unix_endpoint.h"

#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <new>

#include "common/error.h"

namespace fusewire {
namespace {

constexpr uint64_t kWakeEvent = UINT64_MAX;

void add_to_epoll(int epoll, int descriptor, uint64_t tag) {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP;
  event.data.u64 = tag;
  if (epoll_ctl(epoll, EPOLL_CTL_ADD, descriptor, &event) != 0) {
    throw Error(ErrorCode::kInternal, std::string("epoll_ctl: ") + std::strerror(errno));
  }
}

// Signals belong to the user's threads: Python's handlers must run there.
class BlockedSignals {
 public:
  BlockedSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~BlockedSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  BlockedSignals(const BlockedSignals&) = delete;
  BlockedSignals& operator=(const BlockedSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

UnixEndpoint::UnixEndpoint(int rank, int size, Segment segment, std::vector<Connection> connections)
    : StarEndpoint(rank, size, segment.star()),
      process_(getpid()),
      connections_(std::move(connections)),
      epoll_(Descriptor::make([] { return epoll_create1(EPOLL_CLOEXEC); })),
      wake_(Descriptor::make([] { return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK); })),
      segment_(std::move(segment)) {
  if (!epoll_ || !wake_) throw Error(ErrorCode::kInternal, std::string("epoll: ") + std::strerror(errno));
  add_to_epoll(epoll_.get(), wake_.get(), kWakeEvent);
  for (size_t i = 0; i < connections_.size(); ++i) add_to_epoll(epoll_.get(), connections_[i].socket.get(), i);
  add_fork_hook();
}

UnixEndpoint::~UnixEndpoint() {
  remove_fork_hook();
  if (!forgotten() && !left_.exchange(true)) close_all();
}

SharedMapping UnixEndpoint::map_shared(uint64_t offset, size_t size) {
  if (forgotten() || left_.load()) throw Error(ErrorCode::kShutdown, "this rank has left; it can map no memory");
  const std::lock_guard lock(mutex_);
  return segment_.map_data(offset, size);
}

void UnixEndpoint::watch(DepartureCallback callback) {
  if (forgotten() || left_.load()) return;
  if (watcher_.joinable()) throw Error(ErrorCode::kInvalidArgument, "watch() was called twice");
  callback_ = std::move(callback);
  const BlockedSignals blocked;
  watcher_ = std::thread([this] { run_watcher(); });
}

void UnixEndpoint::run_watcher() {
  pthread_setname_np(pthread_self(), "fw-watch");
  std::array<epoll_event, 16> events{};
  while (!stopping_.load()) {
    const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), -1);
    for (int i = 0; i < count && !stopping_.load(); ++i) {
      const uint64_t tag = events[static_cast<size_t>(i)].data.u64;
      if (tag == kWakeEvent) {
        deliver_faults();
      } else {
        read_socket(static_cast<size_t>(tag));
      }
    }
  }
}

void UnixEndpoint::read_socket(size_t index) {
  Connection& connection = connections_[index];
  SocketFrame frame;
  Goodbye goodbye;
  switch (connection.reader.read(connection.socket.get(), frame)) {
    case SocketReader::Result::kNothing:
      return;
    case SocketReader::Result::kFrame:
      if (decode(frame, goodbye)) return depart(index, goodbye.clean, std::move(goodbye.reason));
      return depart(index, false, "malformed frame on its socket");
    case SocketReader::Result::kMalformed:
      return depart(index, false, "malformed frame on its socket");
    case SocketReader::Result::kClosed:
      return depart(index, false,
                    "its connection closed without a goodbye (killed? pid " + std::to_string(connection.pid) +
                        ", exit not seen)");
  }
}

void UnixEndpoint::deliver_faults() {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = read(wake_.get(), &count, sizeof count);
  std::vector<std::pair<size_t, Fault>> faults;
  {
    const std::lock_guard lock(mutex_);
    faults.swap(faults_);
  }
  for (auto& [index, fault] : faults) {
    if (links()[index]->departed.load()) continue;
    const int socket = connections_[index].socket.get();
    // Tell it why it loses its connection, or it would take this rank for dead.
    send_frame(socket, encode(Goodbye{.clean = false, .reason = "dropped its connection: " + fault}));
    depart(index, false, std::move(fault));
    shutdown(socket, SHUT_RDWR);
  }
}

void UnixEndpoint::depart(size_t index, bool clean, std::string reason) {
  Link& link = *links()[index];
  link.departed.store(true);
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, connections_[index].socket.get(), nullptr);
  callback_({.rank = link.rank, .clean = clean, .reason = std::move(reason)});
  seat().alarm();
}

void UnixEndpoint::on_fault(Link& link, const Fault& fault) {
  {
    const std::lock_guard lock(mutex_);
    faults_.emplace_back(rank() == 0 ? link.rank - 1 : 0, fault);
  }
  wake_watcher();
}

void UnixEndpoint::wake_watcher() {
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof one);
}

void UnixEndpoint::goodbye(bool clean, const std::string& reason) {
  if (forgotten() || left_.exchange(true)) return;
  const SocketFrame frame = encode(Goodbye{.clean = clean, .reason = reason});
  for (size_t i = 0; i < connections_.size(); ++i) {
    // What is in the peer's receive buffer stays readable there after this process is gone.
    if (!links()[i]->departed.load()) send_frame(connections_[i].socket.get(), frame);
  }
  close_all();
}

void UnixEndpoint::close_all() {
  if (watcher_.joinable()) {
    stopping_.store(true);
    wake_watcher();
    watcher_.join();
  }
  callback_ = nullptr;
  for (Connection& connection : connections_) connection.socket.close();
  epoll_.close();
  wake_.close();
  const std::lock_guard lock(mutex_);
  segment_.close();
}

void UnixEndpoint::in_forked_child() noexcept {
  forget_memory();
  // The thread does not exist here, so its handle can be neither joined nor detached.
  ::new (&watcher_) std::thread;
}

void UnixEndpoint::abandon_after_fork() noexcept {
  if (forgotten() || getpid() == process_) return;  // usual: the fork handler has been here
  in_forked_child();
  for (Connection& connection : connections_) connection.socket.close_in_child();
  epoll_.close_in_child();
  wake_.close_in_child();
  segment_.close_in_child();
}

}  // namespace fusewire
