// An NCCL whose ranks are threads of this process and whose GPUs are CudaDoubles. A collective is work on each member's
// stream that runs when the streams of all members have come to it. It does what NCCL promises and no more: sums are
// made two at a time in the type that travels, Min and Max of floats are refused (NCCL's drop NaN), a call on a
// communicator that does not block may have done nothing yet. What NCCL would answer by undefined behaviour or by
// hanging is a mistake, in words: other arguments or another order than the others', sends outside of a group, a call
// during another, on a busy communicator or on one that is gone, windows that are not alike.
#pragma once

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "collective/nccl/nccl_api.h"
#include "simt/cuda_double.h"
#include "simt/nccl_fabric.h"

namespace fusewire::testing {

class NcclDouble final : public NcclApi {
 public:
  NcclDouble(NcclFabric& fabric, CudaDouble& cuda) : fabric_(fabric), cuda_(cuda) {}
  ~NcclDouble() override;

  // Set before use.
  std::string fails;    // the name of the call that fails, "all_reduce" ...
  int fails_after = 0;  // ... after so many good ones
  std::string silent;   // "init_rank_config": is called, but never takes part
  int slow_polls = 0;   // so many times the answer to a call is "in progress"
  bool memory = true;
  bool windows = true;
  bool null_windows = false;
  size_t most_memory = ~size_t{0};  // mem_alloc of more fails
  std::atomic<NcclResult> async_error{NcclResult::kSuccess};

  // What has happened.
  std::vector<NcclCall> calls() const;
  size_t called(const std::string& name) const;
  size_t open_communicators() const;

  int version() const override { return nccl_version(2, 28, 3); }
  bool supports_memory() const override { return memory; }
  bool supports_windows() const override { return windows; }
  std::string describe(NcclResult result, NcclComm comm) override;

  NcclResult get_unique_id(NcclUniqueId& id) override;
  NcclResult init_rank_config(NcclComm& comm, int size, const NcclUniqueId& id, int rank, NcclConfig& config) override;
  NcclResult get_async_error(NcclComm comm, NcclResult& error) override;
  NcclResult abort(NcclComm comm) override;
  NcclResult finalize(NcclComm comm) override;
  NcclResult destroy(NcclComm comm) override;
  NcclResult group_start() override;
  NcclResult group_end() override;
  NcclResult all_reduce(const void* from, void* to, size_t count, NcclType type, NcclOp op, NcclComm comm,
                        Stream stream) override;
  NcclResult reduce(const void* from, void* to, size_t count, NcclType type, NcclOp op, int root, NcclComm comm,
                    Stream stream) override;
  NcclResult reduce_scatter(const void* from, void* to, size_t count, NcclType type, NcclOp op, NcclComm comm,
                            Stream stream) override;
  NcclResult all_gather(const void* from, void* to, size_t count, NcclType type, NcclComm comm, Stream stream) override;
  NcclResult broadcast(const void* from, void* to, size_t count, NcclType type, int root, NcclComm comm,
                       Stream stream) override;
  NcclResult send(const void* from, size_t count, NcclType type, int peer, NcclComm comm, Stream stream) override;
  NcclResult recv(void* to, size_t count, NcclType type, int peer, NcclComm comm, Stream stream) override;
  NcclResult mem_alloc(void** memory, size_t bytes) override;
  NcclResult mem_free(void* memory) override;
  NcclResult window_register(NcclComm comm, void* memory, size_t bytes, NcclWindow& window, int flags) override;
  NcclResult window_deregister(NcclComm comm, NcclWindow window) override;

 private:
  using Member = NcclFabric::Member;
  using Meeting = NcclFabric::Meeting;
  class Visit;

  std::shared_ptr<Member> member_of(NcclComm comm) const;
  bool note(NcclCall call);  // whether it is to succeed
  NcclResult collective(NcclCall call, NcclComm comm);
  NcclResult answer(const std::shared_ptr<Member>& member, std::vector<NcclCall> calls);
  void launch(const std::shared_ptr<Member>& member, const std::vector<NcclCall>& calls);
  std::shared_ptr<Meeting> meet(Member& member, const NcclCall& call);

  NcclFabric& fabric_;
  CudaDouble& cuda_;
  std::vector<std::shared_ptr<Member>> members_;
  std::map<void*, size_t> allocations_;
  int depth_ = 0;
  std::thread::id group_thread_;
  std::shared_ptr<Member> group_member_;
  std::vector<NcclCall> grouped_;
  std::vector<NcclCall> calls_;
};

}  // namespace fusewire::testing
