#include "simt/nccl_double.h"

#include <algorithm>
#include <cstring>

namespace fusewire::testing {

namespace {

bool floats(NcclType type) { return type >= NcclType::kFloat16; }

// Where memory is, as far as all members must agree about it.
std::string place_of(const NcclFabric::Member& member, const std::byte* memory) {
  for (const auto& [number, window] : member.open) {
    if (memory >= window.first && memory < window.first + window.second) {
      return "window " + std::to_string(number) + " at " + std::to_string(memory - window.first);
    }
  }
  return "elsewhere";
}

bool reduces(const std::string& name) { return name == "all_reduce" || name == "reduce" || name == "reduce_scatter"; }

}  // namespace

// One call on a communicator: there is no other at the time.
class NcclDouble::Visit {
 public:
  Visit(NcclDouble& nccl, NcclComm comm, const char* what, bool any_time = false) : member_(nccl.member_of(comm)) {
    const std::lock_guard lock(nccl.fabric_.mutex_);
    if (member_->in_call.exchange(true)) nccl.fabric_.mistake(std::string(what) + " during another call");
    good_ = !member_->gone();
    if (!good_) nccl.fabric_.mistake(std::string(what) + " on a communicator that is gone");
    const bool busy = member_->busy_polls > 0 || member_->waits_for != nullptr;
    if (good_ && busy && !any_time) {
      nccl.fabric_.mistake(std::string(what) + " on a communicator that is still busy");
      good_ = false;
    }
  }
  ~Visit() { member_->in_call = false; }
  Visit(const Visit&) = delete;
  Visit& operator=(const Visit&) = delete;

  bool good() const { return good_; }
  Member& member() const { return *member_; }
  const std::shared_ptr<Member>& shared() const { return member_; }

 private:
  const std::shared_ptr<Member> member_;
  bool good_;
};

std::shared_ptr<NcclDouble::Member> NcclDouble::member_of(NcclComm comm) const {
  const std::lock_guard lock(fabric_.mutex_);
  for (const auto& member : members_) {
    if (reinterpret_cast<NcclComm>(member.get()) == comm) return member;
  }
  return nullptr;
}

NcclDouble::~NcclDouble() {
  const std::lock_guard lock(fabric_.mutex_);
  for (const auto& member : members_) member->aborted = true;
}

std::vector<NcclCall> NcclDouble::calls() const {
  const std::lock_guard lock(fabric_.mutex_);
  return calls_;
}

size_t NcclDouble::called(const std::string& name) const {
  const auto all = calls();
  return static_cast<size_t>(
      std::count_if(all.begin(), all.end(), [&](const NcclCall& call) { return call.name == name; }));
}

size_t NcclDouble::open_communicators() const {
  const std::lock_guard lock(fabric_.mutex_);
  return static_cast<size_t>(
      std::count_if(members_.begin(), members_.end(), [](const auto& member) { return !member->gone(); }));
}

bool NcclDouble::note(NcclCall call) {
  const std::lock_guard lock(fabric_.mutex_);
  const bool fail = call.name == fails && fails_after-- <= 0;
  calls_.push_back(std::move(call));
  return !fail;
}

std::string NcclDouble::describe(NcclResult result, NcclComm) {
  return "double error " + std::to_string(static_cast<int>(result));
}

NcclResult NcclDouble::get_unique_id(NcclUniqueId& id) {
  if (!note({.name = "get_unique_id"})) return NcclResult::kSystemError;
  const std::lock_guard lock(fabric_.mutex_);
  std::string text = "communicator " + std::to_string(++fabric_.ids_);
  text.resize(sizeof(id.internal), '.');
  std::memcpy(id.internal, text.data(), sizeof(id.internal));
  return NcclResult::kSuccess;
}

NcclResult NcclDouble::init_rank_config(NcclComm& comm, int size, const NcclUniqueId& id, int rank,
                                        NcclConfig& config) {
  if (!note({.name = "init_rank_config"})) return NcclResult::kSystemError;
  const std::lock_guard lock(fabric_.mutex_);
  if (!cuda_.is_current()) fabric_.mistake("a communicator is made while another GPU is current");
  if (config.blocking != 0 || config.magic != 0xcafebeef) fabric_.mistake("a communicator would block");
  auto& group = fabric_.groups_[std::string(id.internal, sizeof(id.internal))];
  if (!group) group = std::make_shared<NcclFabric::Group>();
  if (group->size == 0) group->size = size;
  if (group->size != size || !(rank >= 0 && rank < size) || group->members.contains(rank)) {
    fabric_.mistake("a communicator is made of other members");
    return NcclResult::kInvalidArgument;
  }
  Member& member = *members_.emplace_back(std::make_shared<Member>());
  member.group = group;
  member.rank = rank;
  member.busy_polls = slow_polls;
  member.waits_for = [group] { return group->members.size() == static_cast<size_t>(group->size); };
  if (silent != "init_rank_config") group->members.insert(rank);
  comm = reinterpret_cast<NcclComm>(&member);
  return NcclResult::kInProgress;
}

NcclResult NcclDouble::get_async_error(NcclComm comm, NcclResult& error) {
  const Visit visit(*this, comm, "get_async_error", true);
  if (!visit.good()) return NcclResult::kInvalidArgument;
  Member& member = visit.member();
  std::vector<NcclCall> now;
  {
    const std::lock_guard lock(fabric_.mutex_);
    error = NcclResult::kInProgress;
    if (member.busy_polls > 0) {
      --member.busy_polls;
    } else if (member.waits_for == nullptr || member.waits_for()) {
      member.waits_for = nullptr;
      now = std::exchange(member.held, {});
      error = NcclResult::kSuccess;
    }
    if (async_error != NcclResult::kSuccess) error = async_error;
  }
  launch(visit.shared(), now);
  return NcclResult::kSuccess;
}

NcclResult NcclDouble::abort(NcclComm comm) {
  const bool good = note({.name = "abort"});
  {
    const Visit visit(*this, comm, "abort", true);
    const std::lock_guard lock(fabric_.mutex_);
    visit.member().aborted = true;
  }
  fabric_.world->changed();
  return good ? NcclResult::kSuccess : NcclResult::kSystemError;
}

NcclResult NcclDouble::finalize(NcclComm comm) {
  const Visit visit(*this, comm, "finalize");
  if (!visit.good()) return NcclResult::kInvalidArgument;
  if (!note({.name = "finalize"})) return NcclResult::kSystemError;
  const std::lock_guard lock(fabric_.mutex_);
  visit.member().finalized = true;
  visit.member().busy_polls = slow_polls;
  return slow_polls > 0 ? NcclResult::kInProgress : NcclResult::kSuccess;
}

NcclResult NcclDouble::destroy(NcclComm comm) {
  const Visit visit(*this, comm, "destroy");
  if (!visit.good()) return NcclResult::kInvalidArgument;
  if (!note({.name = "destroy"})) return NcclResult::kSystemError;
  const std::lock_guard lock(fabric_.mutex_);
  if (!visit.member().finalized) fabric_.mistake("a communicator is destroyed that was not finalized");
  if (!visit.member().open.empty()) fabric_.mistake("a communicator is destroyed that has windows");
  visit.member().destroyed = true;
  return NcclResult::kSuccess;
}

NcclResult NcclDouble::group_start() {
  if (!note({.name = "group_start"})) return NcclResult::kSystemError;
  if (depth_++ == 0) group_thread_ = std::this_thread::get_id();
  return NcclResult::kSuccess;
}

NcclResult NcclDouble::group_end() {
  const bool good = note({.name = "group_end"});
  if (depth_ == 0 || group_thread_ != std::this_thread::get_id()) {
    const std::lock_guard lock(fabric_.mutex_);
    fabric_.mistake("a group ends that did not begin on this thread");
    return NcclResult::kInvalidUsage;
  }
  if (--depth_ > 0) return NcclResult::kSuccess;
  const std::shared_ptr<Member> member = std::exchange(group_member_, nullptr);
  std::vector<NcclCall> calls = std::exchange(grouped_, {});
  if (!good) return NcclResult::kSystemError;
  return member == nullptr ? NcclResult::kSuccess : answer(member, std::move(calls));
}

NcclResult NcclDouble::answer(const std::shared_ptr<Member>& member, std::vector<NcclCall> calls) {
  if (slow_polls == 0) {
    launch(member, calls);
    return NcclResult::kSuccess;
  }
  const std::lock_guard lock(fabric_.mutex_);
  member->held = std::move(calls);
  member->busy_polls = slow_polls;
  return NcclResult::kInProgress;
}

NcclResult NcclDouble::collective(NcclCall call, NcclComm comm) {
  const Visit visit(*this, comm, call.name.c_str());
  if (!visit.good()) return NcclResult::kInvalidArgument;
  call.grouped = depth_ > 0;
  if (!note(call)) return NcclResult::kInvalidUsage;
  {
    const std::lock_guard lock(fabric_.mutex_);
    if (reduces(call.name) || call.name == "all_gather") {
      // The own part of a reduce-scatter's result, or of what an allgather gives, is another one for each member.
      const size_t own = call.count * width_of(call.type) * static_cast<size_t>(visit.member().rank);
      const auto place = [&](const void* memory, bool parts) {
        return place_of(visit.member(), static_cast<const std::byte*>(memory) - (parts ? own : 0));
      };
      call.from_place = place(call.from, call.name == "all_gather");
      call.to_place = place(call.to, call.name == "reduce_scatter");
    }
    if (call.count == 0 || call.stream == nullptr) fabric_.mistake(call.name + " of nothing, or on no stream");
    if (reduces(call.name) && floats(call.type) && call.detail >= static_cast<int>(NcclOp::kMax)) {
      fabric_.mistake("NCCL is asked for Min or Max of floats, which drops NaN");
    }
    if ((call.name == "send" || call.name == "recv") && depth_ == 0) {
      fabric_.mistake(call.name + " outside of a group waits for its counterpart alone");
    }
  }
  if (depth_ == 0) return answer(visit.shared(), {std::move(call)});
  group_member_ = visit.shared();
  grouped_.push_back(std::move(call));
  return NcclResult::kSuccess;
}

// The mutex is held.
std::shared_ptr<NcclDouble::Meeting> NcclDouble::meet(Member& member, const NcclCall& call) {
  const int me = member.rank;
  const bool message = call.name == "send" || call.name == "recv";
  std::string key;
  if (!message) {
    key = "collective " + std::to_string(++member.collectives);
  } else {
    const bool gives = call.name == "send";
    const uint64_t number = gives ? ++member.sent[call.detail] : ++member.received[call.detail];
    key = std::to_string(gives ? me : call.detail) + " to " + std::to_string(gives ? call.detail : me) + " " +
          std::to_string(number);
  }
  auto& meeting = member.group->meetings[key];
  if (!meeting) meeting = std::make_shared<Meeting>();
  meeting->wanted = message ? 2 : static_cast<size_t>(member.group->size);
  for (const auto& [other, theirs] : meeting->calls) {
    const bool same_kind = message || (theirs.name == call.name && theirs.detail == call.detail);
    if (!same_kind || theirs.count != call.count || theirs.type != call.type || theirs.root != call.root) {
      fabric_.mistake(key + ": rank " + std::to_string(me) + " calls " + call.name + " of " +
                      std::to_string(call.count) + ", rank " + std::to_string(other) + " " + theirs.name + " of " +
                      std::to_string(theirs.count));
    }
    if (theirs.from_place != call.from_place || theirs.to_place != call.to_place) {
      fabric_.mistake(key + ": members use windows differently");
    }
  }
  meeting->calls[me] = call;
  return meeting;
}

void NcclDouble::launch(const std::shared_ptr<Member>& shared, const std::vector<NcclCall>& calls) {
  if (calls.empty()) return;
  Member& member = *shared;
  std::vector<std::shared_ptr<Meeting>> meetings;
  std::vector<CudaDouble::Use> uses;
  {
    const std::lock_guard lock(fabric_.mutex_);
    for (const NcclCall& call : calls) {
      meetings.push_back(meet(member, call));
      const size_t bytes = call.count * width_of(call.type);
      const auto n = static_cast<size_t>(member.group->size);
      const bool reads = call.name != "recv" && (call.name != "broadcast" || call.root == member.rank);
      const bool writes = call.name != "send" && (call.name != "reduce" || call.root == member.rank);
      if (reads) uses.push_back({call.from, call.name == "reduce_scatter" ? bytes * n : bytes, false});
      if (writes) uses.push_back({call.to, call.name == "all_gather" ? bytes * n : bytes, true});
    }
  }
  NcclFabric& fabric = fabric_;
  cuda_.launch_when("nccl", calls.front().stream, uses, [&fabric, shared, meetings] {
    const std::lock_guard lock(fabric.mutex_);
    const Member& member = *shared;
    if (member.aborted) return true;
    bool all = true;
    for (const auto& meeting : meetings) {
      meeting->arrived.insert(member.rank);
      if (!meeting->done && meeting->arrived.size() == meeting->wanted) {
        NcclFabric::perform(*member.group, *meeting);
        meeting->done = true;
      }
      all = all && meeting->done;
    }
    return all;
  });
}

NcclResult NcclDouble::all_reduce(const void* from, void* to, size_t count, NcclType type, NcclOp op, NcclComm comm,
                                  Stream stream) {
  return collective({"all_reduce", from, to, count, type, static_cast<int>(op), -1, stream}, comm);
}
NcclResult NcclDouble::reduce(const void* from, void* to, size_t count, NcclType type, NcclOp op, int root,
                              NcclComm comm, Stream stream) {
  return collective({"reduce", from, to, count, type, static_cast<int>(op), root, stream}, comm);
}
NcclResult NcclDouble::reduce_scatter(const void* from, void* to, size_t count, NcclType type, NcclOp op, NcclComm comm,
                                      Stream stream) {
  return collective({"reduce_scatter", from, to, count, type, static_cast<int>(op), -1, stream}, comm);
}
NcclResult NcclDouble::all_gather(const void* from, void* to, size_t count, NcclType type, NcclComm comm,
                                  Stream stream) {
  return collective({"all_gather", from, to, count, type, -1, -1, stream}, comm);
}
NcclResult NcclDouble::broadcast(const void* from, void* to, size_t count, NcclType type, int root, NcclComm comm,
                                 Stream stream) {
  return collective({"broadcast", from, to, count, type, -1, root, stream}, comm);
}
NcclResult NcclDouble::send(const void* from, size_t count, NcclType type, int peer, NcclComm comm, Stream stream) {
  return collective({"send", from, nullptr, count, type, peer, -1, stream}, comm);
}
NcclResult NcclDouble::recv(void* to, size_t count, NcclType type, int peer, NcclComm comm, Stream stream) {
  return collective({"recv", nullptr, to, count, type, peer, -1, stream}, comm);
}

NcclResult NcclDouble::mem_alloc(void** at, size_t bytes) {
  if (!note({.name = "mem_alloc", .count = bytes}) || bytes > most_memory) return NcclResult::kUnhandledCudaError;
  *at = cuda_.allocate(bytes);
  const std::lock_guard lock(fabric_.mutex_);
  if (!cuda_.is_current()) fabric_.mistake("memory is allocated while another GPU is current");
  allocations_[*at] = bytes;
  return NcclResult::kSuccess;
}

NcclResult NcclDouble::mem_free(void* at) {
  const bool good = note({.name = "mem_free"});
  {
    const std::lock_guard lock(fabric_.mutex_);
    if (allocations_.erase(at) == 0) fabric_.mistake("memory is freed that NCCL has not allocated");
    for (const auto& member : members_) {
      for (const auto& [number, window] : member->open) {
        if (window.first == at && !member->gone()) fabric_.mistake("memory is freed that is still a window");
      }
    }
  }
  cuda_.free(at);
  return good ? NcclResult::kSuccess : NcclResult::kUnhandledCudaError;
}

NcclResult NcclDouble::window_register(NcclComm comm, void* at, size_t bytes, NcclWindow& window, int flags) {
  const Visit visit(*this, comm, "window_register");
  if (!visit.good()) return NcclResult::kInvalidArgument;
  if (!note({.name = "window_register", .count = bytes})) return NcclResult::kInvalidUsage;
  const std::lock_guard lock(fabric_.mutex_);
  Member& member = visit.member();
  const auto found = allocations_.find(at);
  if (found == allocations_.end() || found->second < bytes || bytes % kNcclWindowAlignment != 0 ||
      flags != kNcclWindowSymmetric) {
    fabric_.mistake("a window on memory that is not NCCL's, too small or not a multiple of its alignment");
  }
  const int number = ++member.windows;
  const std::shared_ptr<NcclFabric::Group> group = member.group;
  const auto size = group->window_bytes.emplace(number, bytes);
  if (size.first->second != bytes) fabric_.mistake("members register windows of different sizes");
  ++group->registered[number];
  if (null_windows) {
    window = nullptr;
  } else {
    member.open[number] = {static_cast<std::byte*>(at), bytes};
    window = reinterpret_cast<NcclWindow>(static_cast<size_t>(number));
  }
  member.busy_polls = slow_polls;
  member.waits_for = [group, number] { return group->registered[number] == static_cast<size_t>(group->size); };
  return NcclResult::kInProgress;
}

NcclResult NcclDouble::window_deregister(NcclComm comm, NcclWindow window) {
  const Visit visit(*this, comm, "window_deregister");
  if (!visit.good()) return NcclResult::kInvalidArgument;
  if (!note({.name = "window_deregister"})) return NcclResult::kInvalidUsage;
  const std::lock_guard lock(fabric_.mutex_);
  const auto number = static_cast<int>(reinterpret_cast<size_t>(window));
  if (visit.member().open.erase(number) == 0) fabric_.mistake("a window is given up that there is not");
  return NcclResult::kSuccess;
}

}  // namespace fusewire::testing
