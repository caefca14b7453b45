// An Endpoint whose neighbours are other processes of this host: the mailboxes lie in a Segment, and a socket to each
// neighbour tells whether it lives and why it left.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "transport/fork_guard.h"
#include "transport/segment.h"
#include "transport/socket.h"
#include "transport/star.h"

namespace fusewire {

// A connection past its handshake.
struct Connection {
  Descriptor socket;
  SocketReader reader;
  pid_t pid = 0;
};

class UnixEndpoint final : public StarEndpoint, private ForkHook {
 public:
  // One connection per neighbour, by rank.
  UnixEndpoint(int rank, int size, Segment segment, std::vector<Connection> connections);
  ~UnixEndpoint() override;

  SharedMapping map_shared(uint64_t offset, size_t size) override;
  void watch(DepartureCallback callback) override;
  void goodbye(bool clean, const std::string& reason) override;
  void abandon_after_fork() noexcept override;

 private:
  void on_fault(Link& link, const Fault& fault) override;
  void in_forked_child() noexcept override;

  void run_watcher();
  void read_socket(size_t index);
  void deliver_faults();
  void depart(size_t index, bool clean, std::string reason);
  void wake_watcher();
  void close_all();

  const pid_t process_;
  std::vector<Connection> connections_;  // as links()
  Descriptor epoll_;
  Descriptor wake_;  // eventfd: there are faults, or it is time to stop
  DepartureCallback callback_;
  std::thread watcher_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> left_{false};

  std::mutex mutex_;  // guards the members below; nothing else is taken under it but the fork registry's lock
  Segment segment_;
  std::vector<std::pair<size_t, Fault>> faults_;  // link index, what the driver saw
};

}  // namespace fusewire
