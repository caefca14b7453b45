// An MPI whose ranks are threads of this process. Nothing completes sooner than MPI must: a send only when its receive
// has been posted and tested, and then with some luck; a receive buffer holds rubbish until then. So whoever reuses a
// buffer too early, or relies on an order that MPI does not promise, gets wrong bytes.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "collective/mpi/mpi_api.h"

namespace fusewire::testing {

struct MpiMessage {
  int from;
  int to;
  int tag;
  const std::byte* data;
  int bytes;
  bool taken = false;
};

// What the ranks share.
struct MpiFabric {
  explicit MpiFabric(int n) : size(n) {}

  const int size;
  std::vector<int> mpi_ranks;  // of the job's ranks, where they differ
  bool payload = true;         // false: bytes are counted, but not copied
  std::mutex mutex;
  std::map<std::tuple<uint64_t, int, int, int>, std::deque<std::shared_ptr<MpiMessage>>> mail;  // comm, from, to, tag
  std::map<uint64_t, int> joined;                                                               // comm: how many
  std::map<uint64_t, std::vector<std::byte>> gathered;                                          // comm: by MPI rank
  std::vector<std::shared_ptr<MpiMessage>> log;                                                 // every send
};

class MpiDouble final : public MpiApi {
 public:
  MpiDouble(MpiFabric& fabric, int rank) : fabric_(fabric), rank_(rank), dice_(static_cast<unsigned>(rank) + 1) {}

  // Set before use.
  MpiThreads level = MpiThreads::kMultiple;
  std::atomic<bool> is_initialized = false;  // an MPI answers this on any thread
  std::atomic<bool> is_finalized = false;
  std::string fails;    // the name of the call that fails ...
  int fails_after = 0;  // ... after so many good ones
  std::function<void()> on_finalize;

  // What has happened.
  std::vector<std::string> calls;
  std::set<std::thread::id> threads;
  size_t open_requests() const { return requests_.size(); }

  std::string library() override { return "Double MPI 1.0"; }
  bool initialized() override { return is_initialized; }
  bool finalized() override { return is_finalized; }
  int initialize(MpiThreads wanted, MpiThreads& got) override {
    got = std::min(wanted, level);
    is_initialized = true;
    return note("MPI_Init_thread");
  }
  int finalize() override {
    if (on_finalize) on_finalize();
    is_finalized = true;
    return note("MPI_Finalize");
  }
  int query_threads(MpiThreads& got) override {
    got = level;
    return note("MPI_Query_thread");
  }
  int world(int& rank, int& size) override {
    rank = rank_;
    size = fabric_.size;
    return note("MPI_Comm_size");
  }
  std::string describe(int error) override { return "double error " + std::to_string(error); }

  int duplicate_world(MpiComm& comm, MpiRequest& request) override {
    const std::lock_guard lock(fabric_.mutex);
    comm.bits = ++last_comm_;
    ++fabric_.joined[comm.bits];
    request = add({Request::kJoin, comm.bits, nullptr, nullptr, 0});
    return note("MPI_Comm_idup");
  }
  int return_errors(MpiComm) override { return note("MPI_Comm_set_errhandler"); }
  int free(MpiComm& comm) override {
    comm = {};
    return note("MPI_Comm_free");
  }

  int gather_all(const void* mine, void* all, int bytes, MpiComm comm, MpiRequest& request) override {
    const std::lock_guard lock(fabric_.mutex);
    const auto width = static_cast<size_t>(bytes);
    auto& row = fabric_.gathered[comm.bits];
    row.resize(width * static_cast<size_t>(fabric_.size));
    std::memcpy(row.data() + width * static_cast<size_t>(rank_), mine, width);
    ++fabric_.joined[comm.bits + (1 << 20)];
    request = add({Request::kGather, comm.bits, nullptr, static_cast<std::byte*>(all), bytes});
    return note("MPI_Iallgather");
  }

  int send(const void* data, int bytes, int peer, int tag, MpiComm comm, MpiRequest& request) override {
    const std::lock_guard lock(fabric_.mutex);
    const auto message =
        std::make_shared<MpiMessage>(MpiMessage{rank_, peer, tag, static_cast<const std::byte*>(data), bytes});
    fabric_.mail[{comm.bits, rank_, peer, tag}].push_back(message);
    fabric_.log.push_back(message);
    request = add({Request::kSend, comm.bits, message, nullptr, bytes});
    return note("MPI_Isend");
  }

  int receive(void* data, int bytes, int peer, int tag, MpiComm comm, MpiRequest& request) override {
    const std::lock_guard lock(fabric_.mutex);
    if (fabric_.payload) std::memset(data, 0xee, static_cast<size_t>(bytes));
    request = add({Request::kReceive, comm.bits, nullptr, static_cast<std::byte*>(data), bytes, peer, tag});
    return note("MPI_Irecv");
  }

  int test_some(std::span<MpiRequest> requests, std::vector<int>& finished) override {
    const std::lock_guard lock(fabric_.mutex);
    finished.clear();
    int error = note("MPI_Testsome");
    match(error);
    for (size_t i = 0; i < requests.size(); ++i) {
      const auto found = requests_.find(requests[i].bits);
      if (found == requests_.end() || !complete(found->second) || dice_() % 3 == 0) continue;
      requests_.erase(found);
      requests[i] = {};
      finished.push_back(static_cast<int>(i));
    }
    std::shuffle(finished.begin(), finished.end(), dice_);
    return error;
  }

  int cancel(MpiRequest& request) override {
    const std::lock_guard lock(fabric_.mutex);
    requests_.at(request.bits).cancelled = true;
    return note("MPI_Cancel");
  }
  int release(MpiRequest& request) override {
    const std::lock_guard lock(fabric_.mutex);
    const auto found = requests_.find(request.bits);
    if (found != requests_.end()) {
      if (found->second.message) found->second.message->data = nullptr;  // the sender's memory may go now
      requests_.erase(found);
    }
    return note("MPI_Request_free");
  }

 private:
  struct Request {
    enum Kind { kJoin, kGather, kSend, kReceive };
    Kind kind;
    uint64_t comm;
    std::shared_ptr<MpiMessage> message;
    std::byte* data;
    int bytes;
    int peer = -1;
    int tag = 0;
    bool cancelled = false;
    bool arrived = false;
  };

  MpiRequest add(Request request) {
    requests_.emplace(++last_request_, std::move(request));
    return {last_request_};
  }

  std::mutex calls_mutex_;

  int note(const char* call) {
    const std::lock_guard lock(calls_mutex_);  // a leaf: taken with the fabric's held
    calls.emplace_back(call);
    threads.insert(std::this_thread::get_id());
    return call == fails && fails_after-- <= 0 ? 17 : 0;
  }

  // Receives take messages in the order in which both were posted (ids grow).
  void match(int& error) {
    for (auto& [id, request] : requests_) {
      if (request.kind != Request::kReceive || request.arrived || request.cancelled) continue;
      auto& queue = fabric_.mail[{request.comm, request.peer, rank_, request.tag}];
      if (queue.empty()) continue;
      if (queue.front()->bytes != request.bytes) error = 15;  // truncated, or another message than was meant
      if (fabric_.payload && error == 0 && queue.front()->data != nullptr) {
        std::memcpy(request.data, queue.front()->data, static_cast<size_t>(request.bytes));
      }
      queue.front()->taken = true;
      queue.pop_front();
      request.arrived = true;
    }
  }

  bool complete(Request& request) {
    switch (request.kind) {
      case Request::kJoin:
        return fabric_.joined[request.comm] == fabric_.size;
      case Request::kGather: {
        if (fabric_.joined[request.comm + (1 << 20)] != fabric_.size) return false;
        const auto& row = fabric_.gathered[request.comm];
        std::memcpy(request.data, row.data(), row.size());
        return true;
      }
      case Request::kSend:
        return request.message->taken;
      case Request::kReceive:
        return request.arrived || request.cancelled;
    }
    return false;
  }

  MpiFabric& fabric_;
  const int rank_;
  std::minstd_rand dice_;
  std::map<uint64_t, Request> requests_;
  uint64_t last_request_ = 0;
  uint64_t last_comm_ = 0;
};

}  // namespace fusewire::testing
