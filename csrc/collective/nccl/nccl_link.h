// One communicator, from the members' first word to its end, and the calls on it.
//
// Note [Who may stop NCCL]
// A collective of NCCL ends when all members have launched theirs, however long that takes, and a call may wait for
// members in a thread of NCCL's. Three parties can end that: the thread that runs buckets (which polls, nccl_api.h Note
// [Calls on a communicator that does not block], and looks at the CPU plane and the clock each time), the thread that
// watches over work on the device (check()), and whoever hears of a lost peer (abort()). NCCL wants one call at a time
// on a communicator, so each call holds `mutex_`, for the call alone: what is waited for is waited for without it.
//
// ncclCommAbort is a call that waits, for what is on the GPU to end: for the work of another communicator that a lost
// peer leaves stuck behind it, say, which is to be aborted next. So abort() has it called on a thread of its own.
//
// Note [A communicator that cannot be made]
// The members cannot agree afterwards on whether all have one: those that have not wait inside of NCCL for the one that
// failed. So that one stops the CPU plane, which ends the wait of the others, and the engine gives all of them its
// words.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "collective/gpu_device.h"
#include "collective/gpu_plane.h"
#include "collective/nccl/nccl_api.h"
#include "common/error.h"

namespace fusewire {

// Bytes to or from one member.
struct NcclPart {
  std::byte* data = nullptr;
  size_t bytes = 0;
  int peer = 0;
};

// All calls but check() and abort() come from one thread at a time. What they put there is on the device's stream when
// they return. They throw Error: kCollective with NCCL's words, kStalled when time is up, what the CPU plane throws
// when it has been stopped, kPeerLost after abort(). Of one member there is no communicator: contributions are copied.
class NcclLink {
 public:
  // `cpu` outlives this; nothing else runs on it meanwhile.
  NcclLink(std::shared_ptr<GpuDevice> device, NcclApi& api, const GpuPlaneOptions& options, Backend& cpu);
  ~NcclLink() { end(); }
  NcclLink(const NcclLink&) = delete;
  NcclLink& operator=(const NcclLink&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  GpuDevice& device() const { return *device_; }
  NcclApi& api() const { return api_; }
  Backend& cpu() const { return cpu_; }

  // `count` numbers of `type`; for one member, `from` may equal `to`.
  void all_reduce(const void* from, void* to, size_t count, NcclType type, NcclOp op);
  // Part i of `from` (each `count` numbers) to member i.
  void reduce_scatter(const void* from, void* to, size_t count, NcclType type, NcclOp op);
  // Part i of `from`, `counts[i]` numbers from byte `offsets[i]` on, to the same place in `to` of member i alone.
  void reduce_parts(const std::byte* from, std::byte* to, const std::vector<size_t>& offsets,
                    const std::vector<size_t>& counts, NcclType type, NcclOp op);
  // The others move bytes.
  void all_gather(const void* from, void* to, size_t bytes);
  void broadcast(const void* from, void* to, size_t bytes, int root);
  void gather_parts(const void* from, const std::vector<NcclPart>& to);  // peer: whose it is; all members, in order
  void exchange(const std::vector<NcclPart>& from, const std::vector<NcclPart>& to);  // empty and own parts left out

  void launch(const char* what, const std::function<NcclResult(NcclComm)>& call);  // any other call

  void abort() noexcept;  // the CPU plane, too: that is how the others hear of it
  void check();

  // For the end of the plane. True once all that was put on the stream is done; false where it is not soon, or has
  // failed. finish() then takes the communicator apart in order, end() by force, if it is still there.
  bool at_rest() noexcept;
  void finish();
  void end() noexcept;

 private:
  using Clock = std::chrono::steady_clock;

  void meet();
  void copy(void* to, const void* from, size_t bytes);  // what a collective of one member is
  void group(const char* what, const std::function<NcclResult(NcclComm)>& calls);
  // Until NCCL has done what it was asked for. Its result.
  NcclResult settle(const char* what, std::chrono::nanoseconds patience);
  [[noreturn]] void fail(const char* what, NcclResult result);
  void throw_if_stopped();  // mutex_ is held

  const std::shared_ptr<GpuDevice> device_;
  NcclApi& api_;
  Backend& cpu_;
  const int rank_;
  const int size_;
  const std::chrono::nanoseconds abort_after_;
  std::atomic<bool> aborted_{false};
  std::mutex mutex_;  // a leaf but for NCCL and CUDA
  NcclComm comm_ = nullptr;
  std::thread aborter_;  // started under mutex_ by the first abort(), joined by end()
  std::optional<Error> failure_;
};

}  // namespace fusewire
