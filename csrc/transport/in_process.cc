// Ranks as threads of one process. The mailboxes and seats are the same as between processes, over ordinary memory, so
// what the sanitizers see here is what runs there.
#include <sys/mman.h>
#include <unistd.h>

#include <map>
#include <mutex>

#include "common/error.h"
#include "transport/star.h"

namespace fusewire {
namespace {

// Page-aligned zeroes, with a page that cannot be touched behind them.
std::shared_ptr<std::byte> allocate_zeroed(size_t size) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t used = (size + page - 1) / page * page;
  void* memory = size <= SIZE_MAX / 2 ? mmap(nullptr, used + page, PROT_READ | PROT_WRITE,
                                             MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
                                      : MAP_FAILED;
  if (memory == MAP_FAILED) {
    throw Error(ErrorCode::kInvalidArgument, "cannot allocate " + std::to_string(size) + " bytes of shared memory");
  }
  auto* bytes = static_cast<std::byte*>(memory);
  mprotect(bytes + used, page, PROT_NONE);
  return {bytes, [total = used + page](std::byte* begin) { munmap(begin, total); }};
}

// Note [Leaving a fabric]
// A rank that leaves calls its neighbours' callbacks on its own thread, while a neighbour may be leaving too and about
// to destroy what its callback refers to. So a callback runs only between enter() and exit() of its rank's Watch, and
// close() first forbids new entries, then waits for those inside. No lock is held while a callback runs or while
// close() waits; Watch::mutex is a leaf of the lock order.
struct Watch {
  struct Neighbour {
    bool left = false;
    bool told = false;
    Departure departure;
  };

  std::mutex mutex;
  Endpoint::DepartureCallback callback;
  std::map<int, Neighbour> neighbours;
  bool closed = false;
  std::atomic<uint32_t> inside{0};

  void exit() {
    if (inside.fetch_sub(1) == 1) inside.notify_all();
  }

  void close() {
    {
      const std::lock_guard lock(mutex);
      closed = true;
    }
    for (uint32_t n = inside.load(); n != 0; n = inside.load()) inside.wait(n);
    const std::lock_guard lock(mutex);
    callback = nullptr;
  }
};

struct Fabric {
  explicit Fabric(int size)
      : size(size), control(allocate_zeroed(StarMemory::bytes(size))), memory(control.get(), size), watches(size) {}

  // Delivers what is known of `peer` to `observer`, if it has not been told yet.
  void tell(int observer, int peer) {
    Watch& watch = watches[static_cast<size_t>(observer)];
    Departure departure;
    {
      const std::lock_guard lock(watch.mutex);
      Watch::Neighbour& neighbour = watch.neighbours[peer];
      if (watch.closed || !watch.callback || !neighbour.left || neighbour.told) return;
      neighbour.told = true;
      departure = neighbour.departure;
      watch.inside.fetch_add(1);
    }
    watch.callback(departure);
    Seat(memory.seat(observer)).alarm();
    watch.exit();
  }

  void leave(int observer, const Departure& departure) {
    Watch& watch = watches[static_cast<size_t>(observer)];
    {
      const std::lock_guard lock(watch.mutex);
      Watch::Neighbour& neighbour = watch.neighbours[departure.rank];
      if (neighbour.left) return;
      neighbour.left = true;
      neighbour.departure = departure;
    }
    tell(observer, departure.rank);
  }

  const int size;
  std::shared_ptr<std::byte> control;
  StarMemory memory;
  std::vector<Watch> watches;

  std::mutex regions_mutex;
  std::map<uint64_t, std::pair<size_t, std::shared_ptr<std::byte>>> regions;
};

class InProcessEndpoint final : public StarEndpoint {
 public:
  InProcessEndpoint(int rank, std::shared_ptr<Fabric> fabric)
      : StarEndpoint(rank, fabric->size, fabric->memory), fabric_(std::move(fabric)) {}

  ~InProcessEndpoint() override { leave(false, "its endpoint was destroyed without a goodbye"); }

  SharedMapping map_shared(uint64_t offset, size_t size) override {
    const std::lock_guard lock(fabric_->regions_mutex);
    auto found = fabric_->regions.find(offset);
    if (found == fabric_->regions.end()) {
      found = fabric_->regions.emplace(offset, std::pair(size, allocate_zeroed(size))).first;
    } else if (found->second.first != size) {
      throw Error(ErrorCode::kInvalidArgument, "the shared memory at offset " + std::to_string(offset) + " has " +
                                                   std::to_string(found->second.first) + " bytes, not " +
                                                   std::to_string(size));
    }
    const std::shared_ptr<std::byte>& bytes = found->second.second;
    return {bytes, bytes.get(), size};
  }

  void watch(DepartureCallback callback) override {
    Watch& own = fabric_->watches[static_cast<size_t>(rank())];
    {
      const std::lock_guard lock(own.mutex);
      if (own.callback) throw Error(ErrorCode::kInvalidArgument, "watch() was called twice");
      own.callback = [this, callback = std::move(callback)](const Departure& departure) {
        link_to(departure.rank).departed.store(true, std::memory_order_relaxed);
        callback(departure);
      };
    }
    for (const auto& link : links()) fabric_->tell(rank(), link->rank);
  }

  void goodbye(bool clean, const std::string& reason) override { leave(clean, reason); }

  // Threads of a process are not divided by fork(): the child has copies of everything, and nobody to talk to.
  void abandon_after_fork() noexcept override {
    left_.store(true);
    forget_memory();
  }

 private:
  void on_fault(Link& link, const Fault& fault) override {
    fabric_->leave(rank(), {.rank = link.rank, .clean = false, .reason = fault});
  }

  void leave(bool clean, const std::string& reason) {
    if (left_.exchange(true)) return;
    fabric_->watches[static_cast<size_t>(rank())].close();
    for (const auto& link : links()) fabric_->leave(link->rank, {.rank = rank(), .clean = clean, .reason = reason});
  }

  std::shared_ptr<Fabric> fabric_;
  std::atomic<bool> left_{false};
};

}  // namespace

std::vector<std::unique_ptr<Endpoint>> make_in_process_fabric(int size) {
  if (size < 1) throw Error(ErrorCode::kInvalidArgument, "a job has at least one rank, not " + std::to_string(size));
  const auto fabric = std::make_shared<Fabric>(size);
  std::vector<std::unique_ptr<Endpoint>> endpoints;
  for (int rank = 0; rank < size; ++rank) endpoints.push_back(std::make_unique<InProcessEndpoint>(rank, fabric));
  return endpoints;
}

}  // namespace fusewire
