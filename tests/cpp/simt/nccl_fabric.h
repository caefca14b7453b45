// What the NcclDoubles of a test share: who is a member of what, and who calls what when.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "collective/nccl/nccl_api.h"
#include "simt/cuda_world.h"

namespace fusewire::testing {

class NcclDouble;

struct NcclCall {
  std::string name;
  const void* from = nullptr;
  void* to = nullptr;
  size_t count = 0;
  NcclType type = NcclType::kUint8;
  int detail = -1;  // operator, peer
  int root = -1;
  NcclApi::Stream stream = nullptr;
  bool grouped = false;
  std::string from_place{};  // what members must agree about: "window 2 at 4096"
  std::string to_place{};
};

// What the ranks of a test share. Lock order: a GPU's mutex, then `mutex`, then the CudaWorld's last.
class NcclFabric {
 public:
  struct Member;  // of one communicator
  const std::shared_ptr<CudaWorld> world = std::make_shared<CudaWorld>();
  std::vector<std::string> mistakes() const {
    const std::lock_guard lock(mutex_);
    return mistakes_;
  }

 private:
  friend class NcclDouble;

  // One collective, or one message, as its members see it.
  struct Meeting {
    std::map<int, NcclCall> calls;  // by rank; of a message the giver's and the taker's
    std::set<int> arrived;
    size_t wanted = 0;
    bool done = false;
  };
  struct Group {  // of members of one communicator
    int size = 0;
    std::set<int> members;
    std::map<std::string, std::shared_ptr<Meeting>> meetings;
    std::map<int, size_t> registered;  // window number: how many have it
    std::map<int, size_t> window_bytes;
  };

  void mistake(std::string sentence) { mistakes_.push_back(std::move(sentence)); }
  static void perform(const Group& group, const Meeting& meeting);

  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Group>> groups_;  // by id
  int ids_ = 0;
  std::vector<std::string> mistakes_;
};

struct NcclFabric::Member {
  std::shared_ptr<Group> group;
  int rank = 0;
  std::atomic<bool> in_call{false};
  bool aborted = false;
  bool finalized = false;
  bool destroyed = false;
  int busy_polls = 0;               // get_async_error still says "in progress" so often
  std::function<bool()> waits_for;  // and until this is true
  std::vector<NcclCall> held;       // what is put on the stream then
  uint64_t collectives = 0;
  std::map<int, uint64_t> sent;
  std::map<int, uint64_t> received;
  int windows = 0;                                    // numbers given out
  std::map<int, std::pair<std::byte*, size_t>> open;  // windows

  bool gone() const { return aborted || destroyed; }
};

}  // namespace fusewire::testing
