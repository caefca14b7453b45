#include "collective/nccl/nccl_link.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <system_error>
#include <thread>
#include <utility>

#include "collective/host_exchange.h"
#include "common/thread.h"

namespace fusewire {
namespace {

using std::chrono::microseconds;

// How long the end of a plane waits for work that should be done.
constexpr std::chrono::seconds kFarewell{2};

// A poll is a look at a flag. Connections of a first collective take tens of milliseconds, later waits a few us.
class Pause {
 public:
  void sleep() {
    std::this_thread::sleep_for(pause_);
    pause_ = std::min(pause_ * 2, microseconds(1000));
  }

 private:
  microseconds pause_{10};
};

// What member 0 tells the others.
struct Invitation {
  NcclResult result;
  NcclUniqueId id;
  char text[512];
};

bool done_or_on_its_way(NcclResult result) {
  return result == NcclResult::kSuccess || result == NcclResult::kInProgress;
}

}  // namespace

NcclLink::NcclLink(std::shared_ptr<GpuDevice> device, NcclApi& api, const GpuPlaneOptions& options, Backend& cpu)
    : device_(std::move(device)),
      api_(api),
      cpu_(cpu),
      rank_(options.rank),
      size_(options.size),
      abort_after_(options.abort_after) {
  if (size_ > 1) meet();
}

void NcclLink::meet() {
  Invitation mine{};
  if (rank_ == 0) {
    mine.result = api_.get_unique_id(mine.id);
    if (mine.result != NcclResult::kSuccess) {
      api_.describe(mine.result, nullptr).copy(mine.text, sizeof(mine.text) - 1);
    }
  }
  const auto all = exchange_on_host(cpu_, size_, std::as_bytes(std::span(&mine, 1)));
  Invitation first;
  std::memcpy(&first, all.data(), sizeof(first));
  if (first.result != NcclResult::kSuccess) {
    throw Error(ErrorCode::kCollective, std::string("NCCL: no id for a communicator: ") + first.text, 0);
  }
  NcclConfig config;
  config.blocking = 0;
  try {
    NcclResult result = NcclResult::kSuccess;
    device_->api().with_current([&] {
      const std::lock_guard lock(mutex_);
      result = api_.init_rank_config(comm_, size_, first.id, rank_, config);
    });
    if (result == NcclResult::kInProgress) result = settle("making a communicator", abort_after_);
    if (result != NcclResult::kSuccess) fail("making a communicator", result);
  } catch (...) {
    abort();
    end();
    throw;
  }
}

void NcclLink::throw_if_stopped() {
  if (failure_) throw *failure_;
  if (aborted_ || comm_ == nullptr) {
    throw Error(ErrorCode::kPeerLost, "NCCL: the communicator was aborted, because a member is gone or has failed");
  }
}

void NcclLink::fail(const char* what, NcclResult result) {
  const std::lock_guard lock(mutex_);
  if (!failure_) {
    failure_ = Error(ErrorCode::kCollective,
                     std::string("NCCL: ") + what + " failed on rank " + std::to_string(rank_) +
                         " of the process set: " + api_.describe(result, comm_) +
                         ". NCCL_DEBUG=WARN shows more; FUSEWIRE_GPU_BACKEND=staged does without NCCL",
                     rank_);
  }
  throw *failure_;
}

NcclResult NcclLink::settle(const char* what, std::chrono::nanoseconds patience) {
  const auto begin = Clock::now();
  for (Pause pause;; pause.sleep()) {
    NcclResult error = NcclResult::kSuccess;
    {
      const std::lock_guard lock(mutex_);
      throw_if_stopped();
      const NcclResult asked = api_.get_async_error(comm_, error);
      if (asked != NcclResult::kSuccess) error = asked;
    }
    if (error != NcclResult::kInProgress) return error;
    cpu_.check();
    if (patience.count() > 0 && Clock::now() - begin > patience) {
      throw Error(ErrorCode::kStalled,
                  std::string("NCCL: ") + what + " has not ended after " +
                      std::to_string(std::chrono::duration_cast<std::chrono::seconds>(patience).count()) +
                      " s: a member of the process set does not take part");
    }
  }
}

void NcclLink::launch(const char* what, const std::function<NcclResult(NcclComm)>& call) {
  NcclResult result = NcclResult::kSuccess;
  {
    const std::lock_guard lock(mutex_);
    throw_if_stopped();
    result = call(comm_);
  }
  if (result == NcclResult::kInProgress) result = settle(what, abort_after_);
  if (result != NcclResult::kSuccess) fail(what, result);
}

// A group that was begun is ended, whatever happened inside: it belongs to the thread.
void NcclLink::group(const char* what, const std::function<NcclResult(NcclComm)>& calls) {
  launch(what, [&](NcclComm comm) {
    const NcclResult begun = api_.group_start();
    if (begun != NcclResult::kSuccess) return begun;
    const NcclResult inside = calls(comm);
    const NcclResult ended = api_.group_end();
    return done_or_on_its_way(inside) ? ended : inside;
  });
}

void NcclLink::copy(void* to, const void* from, size_t bytes) {
  if (to != from && bytes != 0) device_->api().copy(to, from, bytes, device_->stream());
}

void NcclLink::all_reduce(const void* from, void* to, size_t count, NcclType type, NcclOp op) {
  if (size_ == 1) return copy(to, from, count * width_of(type));
  launch("an allreduce",
         [&](NcclComm comm) { return api_.all_reduce(from, to, count, type, op, comm, device_->stream()); });
}

void NcclLink::reduce_scatter(const void* from, void* to, size_t count, NcclType type, NcclOp op) {
  if (size_ == 1) return copy(to, from, count * width_of(type));
  launch("a reduce-scatter",
         [&](NcclComm comm) { return api_.reduce_scatter(from, to, count, type, op, comm, device_->stream()); });
}

void NcclLink::reduce_parts(const std::byte* from, std::byte* to, const std::vector<size_t>& offsets,
                            const std::vector<size_t>& counts, NcclType type, NcclOp op) {
  if (size_ == 1) return copy(to + offsets[0], from + offsets[0], counts[0] * width_of(type));
  group("a reduce-scatter", [&](NcclComm comm) {
    NcclResult result = NcclResult::kSuccess;
    for (int owner = 0; owner < size_ && done_or_on_its_way(result); ++owner) {
      const auto i = static_cast<size_t>(owner);
      if (counts[i] == 0) continue;
      result = api_.reduce(from + offsets[i], to + offsets[i], counts[i], type, op, owner, comm, device_->stream());
    }
    return result;
  });
}

void NcclLink::all_gather(const void* from, void* to, size_t bytes) {
  if (size_ == 1) return copy(to, from, bytes);
  launch("an allgather",
         [&](NcclComm comm) { return api_.all_gather(from, to, bytes, NcclType::kUint8, comm, device_->stream()); });
}

void NcclLink::broadcast(const void* from, void* to, size_t bytes, int root) {
  if (size_ == 1) return copy(to, from, bytes);
  launch("a broadcast", [&](NcclComm comm) {
    return api_.broadcast(from, to, bytes, NcclType::kUint8, root, comm, device_->stream());
  });
}

void NcclLink::gather_parts(const void* from, const std::vector<NcclPart>& to) {
  if (size_ == 1) return copy(to[0].data, from, to[0].bytes);
  group("an allgather", [&](NcclComm comm) {
    NcclResult result = NcclResult::kSuccess;
    for (const NcclPart& part : to) {
      if (part.bytes == 0 || !done_or_on_its_way(result)) continue;
      result = api_.broadcast(part.peer == rank_ ? from : part.data, part.data, part.bytes, NcclType::kUint8, part.peer,
                              comm, device_->stream());
    }
    return result;
  });
}

void NcclLink::exchange(const std::vector<NcclPart>& from, const std::vector<NcclPart>& to) {
  if (size_ == 1) return;
  group("an exchange", [&](NcclComm comm) {
    NcclResult result = NcclResult::kSuccess;
    const auto each = [&](const std::vector<NcclPart>& parts, auto&& call) {
      for (const NcclPart& part : parts) {
        if (part.bytes != 0 && part.peer != rank_ && done_or_on_its_way(result)) result = call(part);
      }
    };
    each(from, [&](const NcclPart& part) {
      return api_.send(part.data, part.bytes, NcclType::kUint8, part.peer, comm, device_->stream());
    });
    each(to, [&](const NcclPart& part) {
      return api_.recv(part.data, part.bytes, NcclType::kUint8, part.peer, comm, device_->stream());
    });
    return result;
  });
}

void NcclLink::abort() noexcept {
  aborted_ = true;
  cpu_.abort();
  const std::lock_guard lock(mutex_);
  if (comm_ == nullptr) return;
  const NcclComm comm = std::exchange(comm_, nullptr);
  try {
    aborter_ = start_thread("fw-nccl-end", [this, comm] { static_cast<void>(api_.abort(comm)); });
  } catch (const std::system_error&) {  // no thread to be had
    static_cast<void>(api_.abort(comm));
  }
}

void NcclLink::check() {
  cpu_.check();
  if (size_ == 1) return;
  NcclResult error = NcclResult::kSuccess;
  {
    const std::lock_guard lock(mutex_);
    throw_if_stopped();
    const NcclResult asked = api_.get_async_error(comm_, error);
    if (asked != NcclResult::kSuccess) error = asked;
  }
  if (!done_or_on_its_way(error)) fail("work on the device", error);
}

bool NcclLink::at_rest() noexcept {
  try {
    check();
    const SharedEvent mark = device_->mark();
    const auto begin = Clock::now();
    for (Pause pause; !mark->reached(); pause.sleep()) {
      if (Clock::now() - begin > kFarewell) return false;
    }
    return true;
  } catch (const std::exception&) {
    return false;
  }
}

void NcclLink::finish() {
  if (size_ == 1) return;
  NcclResult result = NcclResult::kSuccess;
  {
    const std::lock_guard lock(mutex_);
    throw_if_stopped();
    result = api_.finalize(comm_);
  }
  if (result == NcclResult::kInProgress) result = settle("the end of a communicator", kFarewell);
  if (result != NcclResult::kSuccess) return;  // end() does it
  const std::lock_guard lock(mutex_);
  throw_if_stopped();
  static_cast<void>(api_.destroy(std::exchange(comm_, nullptr)));
}

void NcclLink::end() noexcept {
  NcclComm comm = nullptr;
  {
    const std::lock_guard lock(mutex_);
    comm = std::exchange(comm_, nullptr);
  }
  if (comm != nullptr) static_cast<void>(api_.abort(comm));
  if (aborter_.joinable()) aborter_.join();
}

}  // namespace fusewire
