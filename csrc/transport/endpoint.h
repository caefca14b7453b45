// One rank's end of the control plane: frames to and from its peers, the memory they share, and news of who left. The
// topology is a star: rank 0 talks to everybody, everybody talks to rank 0.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "transport/seat.h"

namespace fusewire {

inline constexpr size_t kMaxFrameBytes = 64u << 20;

// `clean`: the peer said goodbye; its contributions to running collectives are complete. Otherwise its connection
// broke.
struct Departure {
  int rank = -1;
  bool clean = false;
  std::string reason;  // its own words, or what was seen of it, with its pid
};

// Memory shared by the ranks of one host; zero-filled when first mapped.
struct SharedMapping {
  std::shared_ptr<void> keep_alive;  // unmaps when dropped
  std::byte* data = nullptr;
  size_t size = 0;
};

class Endpoint {
 public:
  virtual ~Endpoint() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Sends one frame and rings the peer's seat. Never blocks: what does not fit the mailbox is kept and goes out in
  // flush(). Only the driver of this rank calls send, receive and flush. Frames arrive whole, once, in order; larger
  // than kMaxFrameBytes is Error(kInvalidArgument), and so is a peer that is not a neighbour in the star. Sending to a
  // departed peer is silently dropped; what it sent before it left can still be received.
  virtual void send(int peer, std::span<const std::byte> frame) = 0;
  virtual bool receive(int peer, std::vector<std::byte>& frame) = 0;  // false: nothing there
  virtual bool has_incoming() const = 0;  // any thread, cheap; true when flush() can progress
  virtual void flush() = 0;
  virtual bool has_unsent() const = 0;  // some frame waits for room in a living peer's mailbox

  virtual Seat& seat() = 0;  // of this rank

  // Bytes [offset, offset + size) of the host's shared data area, the same memory on every rank of the host. All ranks
  // pass the same pairs. Throws Error(kInvalidArgument) where that cannot be mapped. Thread-safe.
  virtual SharedMapping map_shared(uint64_t offset, size_t size) = 0;

  // Called once per departed neighbour, whatever the driver is doing and under no lock: on the endpoint's own watcher
  // thread (in process: on the thread of the peer that leaves, or of watch() for one that has left already). This
  // rank's seat is alarmed after each call. Set it once, before anything else happens; departures before that are
  // delivered at once. None is running or will run after goodbye() has returned. It must not call goodbye().
  using DepartureCallback = std::function<void(const Departure&)>;
  virtual void watch(DepartureCallback callback) = 0;

  // Leaves: tells every neighbour why (`clean` as in Departure), then stops the watcher and closes. Idempotent, never
  // blocks on a peer; call it without a lock that a DepartureCallback takes, and with nobody driving. The destructor
  // without goodbye() looks like a crash to the peers.
  virtual void goodbye(bool clean, const std::string& reason) = 0;

  // In a forked child: close every descriptor, unmap, touch nothing that peers see.
  virtual void abandon_after_fork() noexcept = 0;
};

// `size` ranks as threads of one process; the same mailboxes and seats over ordinary memory.
std::vector<std::unique_ptr<Endpoint>> make_in_process_fabric(int size);

// Ranks as processes of one host: Unix sockets for identity, liveness and goodbye, a memfd passed over them for
// mailboxes, seats and the data area. The root listens on an abstract address; peers are checked by SO_PEERCRED and by
// the job's secret before anything else is read.
class UnixListener {
 public:
  virtual ~UnixListener() = default;
  virtual const std::string& address() const = 0;
  // Waits for ranks 1..size-1. Throws Error(kPeerLost) that names the ranks that did not come in time.
  virtual std::unique_ptr<Endpoint> accept_all(std::chrono::milliseconds timeout) = 0;
};
std::unique_ptr<UnixListener> listen_unix(int size, const std::string& secret);
std::unique_ptr<Endpoint> connect_unix(const std::string& address, int rank, int size, const std::string& secret,
                                       std::chrono::milliseconds timeout);

}  // namespace fusewire
