// A CudaApi without a GPU. It keeps every stream's work in a queue and does it in a random legal order, and it checks
// each program of streams and events for what no order may be left to: memory that two pieces of work use, one of them
// writing, must be used in an order that events or the host have fixed.
//
// Note [Clocks of streams]
// Every piece of work has a number on its stream. A clock says, for each stream, up to which number work is known to be
// done before. A stream's clock is what its next work comes after; recording an event copies it, waiting for an event
// takes it over, and so does the host in synchronize() (and reached(), if it says yes). Work starts after everything
// the host knew when it asked for it. So the check needs no unlucky order: a missing wait shows in every run.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "collective/cuda_api.h"
#include "simt/cuda_world.h"

namespace fusewire::testing {

class CudaDouble : public CudaApi {
 public:
  explicit CudaDouble(uint64_t seed, std::shared_ptr<CudaWorld> world = nullptr);
  ~CudaDouble() override;  // work may be left

  Stream create_stream() override;
  void destroy_stream(Stream stream) override;
  Event create_event(bool timed) override;
  void destroy_event(Event event) override;
  void record(Event event, Stream stream) override;
  void wait(Stream stream, Event event) override;
  bool reached(Event event) override;
  void synchronize(Event event) override;
  double elapsed_ms(Event from, Event to) override;  // the pieces of work done between them, as if each took 1 ms
  void call(Stream stream, void (*function)(void*), void* argument) override;
  bool capturing(Stream stream) override;
  void* allocate(size_t bytes) override;
  void free(void* memory) override;
  void* allocate_pinned(size_t bytes) override;
  void free_pinned(void* memory) override;
  void copy(void* to, const void* from, size_t bytes, Stream stream) override;
  void pack(const TransferArgs& args) override;
  void fill(void* memory, int byte, size_t bytes, Stream stream) override;
  void unpack(const TransferArgs& args) override;
  void reduce(const DeviceReduceArgs& args) override;
  void dot(const DeviceDotArgs& args) override;
  void combine(const DeviceCombineArgs& args) override;
  void quantise(const DeviceQuantiseArgs& args) override;
  void dequantise(const DeviceDequantiseArgs& args) override;
  void with_current(const std::function<void()>& function) override;
  std::array<unsigned char, 16> uuid() override { return gpu; }

  // For tests: other work on a stream, and what the host itself does to memory.
  struct Use {
    const void* memory;
    size_t bytes;
    bool writes;
  };
  void launch(const std::string& name, Stream stream, std::vector<Use> uses, std::function<void()> work);
  // Work that runs only once `ready` says so; it is asked with this GPU's mutex held, when all before it is done.
  void launch_when(const std::string& name, Stream stream, std::vector<Use> uses, std::function<bool()> ready);
  void host_uses(const void* memory, size_t bytes, bool writes);
  void drain();                // does all work that is left
  void finish(Stream stream);  // does all work on this stream, and what it waits for
  // The memory is not used any more by work that `stream` does not know of: what comes next may be given its addresses.
  void forget(const void* memory, size_t bytes, Stream stream);
  void capture(Stream stream, bool on);
  void hold(Stream stream, bool on);  // nothing that is on it, or will be, is done meanwhile

  std::array<unsigned char, 16> gpu{};  // which one this pretends to be

  bool is_current() const { return current_ == this; }  // in with_current(), on this thread
  size_t launched(const std::string& name) const;       // how often: "pack", "copy", ...
  bool step_if_possible();                              // for the world

  // One sentence per mistake so far.
  std::vector<std::string> mistakes() const;

 private:
  using Clock = std::map<int, uint64_t>;  // stream -> number of the last work known to be done before

  struct Snapshot {  // what an event was recorded with
    Clock clock;
    bool reached = false;
    bool timed = false;
    uint64_t at = 0;  // how many pieces of work had been done then
  };
  struct Work {
    std::function<void()> run;
    std::shared_ptr<Snapshot> waits_for;
    std::shared_ptr<Snapshot> reaches;
    std::function<bool()> ready{};    // null: at once
    const void* copies_to = nullptr;  // of a copy
    const void* copies_from = nullptr;
  };
  struct StreamState {
    int number = 0;
    Clock clock;
    std::deque<Work> queue;
    bool capturing = false;
    bool held = false;
  };
  struct EventState {
    bool timed = false;
    std::shared_ptr<Snapshot> last;  // null: never recorded
  };
  struct Access {
    std::string name;
    uintptr_t begin;
    uintptr_t end;
    bool writes;
    int stream;  // kHost for the host
    uint64_t number;
  };
  struct Allocation {
    std::unique_ptr<unsigned char[]> bytes;
    size_t size;
    bool pinned;
  };
  static constexpr int kHost = 0;

  static StreamState& stream_of(Stream stream) { return *static_cast<StreamState*>(stream); }
  static EventState& event_of(Event event) { return *static_cast<EventState*>(event); }
  static void join(Clock& into, const Clock& other);
  void check(const Access& access, const Clock& clock);
  void note(const Access& access, const Clock& clock);
  void release(void* memory, bool pinned);
  void* take(size_t bytes, bool pinned);
  std::vector<Use> uses_of(const TransferArgs& args, bool packs) const;
  std::vector<Use> span_uses(const void* table, uint32_t spans, const void* const* sources, int count,
                             DataType dtype) const;
  void put(const std::string& name, Stream stream, const std::vector<Use>& uses, Work work);
  // What will be in a table when the stream has come so far, although the copy that brings it may still be queued.
  const void* content_of(const void* table) const;
  void until(const std::function<bool()>& done);  // or until nothing is left that could do it
  bool waits_for_others();
  bool step();        // does one piece of work that may run; false: none may
  void some_steps();  // a random number of them
  void mistake(std::string sentence);

  static thread_local const CudaDouble* current_;

  const std::shared_ptr<CudaWorld> world_;  // may be null
  mutable std::recursive_mutex mutex_;
  std::mt19937_64 random_;
  std::vector<std::unique_ptr<StreamState>> streams_;
  std::vector<std::unique_ptr<EventState>> events_;
  std::map<const void*, Allocation> allocations_;
  std::vector<Access> accesses_;
  Clock host_;
  uint64_t host_number_ = 0;
  uint64_t done_ = 0;
  int next_stream_ = 1;
  std::map<std::string, size_t> launched_;
  std::vector<std::string> mistakes_;
};

}  // namespace fusewire::testing
