// The seam to NCCL: the few calls that Fusewire makes, one method each, so that order, arguments, errors and silence
// are tested on machines without NCCL. The real one is found by nccl_loader.h. Methods return NCCL's result unless said
// otherwise.
//
// Note [Calls on a communicator that does not block]
// Communicators are made with blocking = 0. Any call on one may then return kInProgress: what it asked for happens in a
// thread of NCCL's, and until get_async_error() says something else, work may be missing on the stream, results of the
// call (a communicator, a window) may not be read, and no other call may be made on it but get_async_error() and
// abort(). That is what makes it possible to give up when a peer is gone.
#pragma once

#include <string>

#include "collective/cuda_api.h"
#include "collective/nccl/nccl_abi.h"

namespace fusewire {

class NcclApi {
 public:
  using Stream = CudaApi::Stream;

  virtual ~NcclApi() = default;

  // At any time, from any thread.
  virtual int version() const = 0;                                     // nccl_version(major, minor, patch)
  virtual bool supports_memory() const = 0;                            // mem_alloc, mem_free
  virtual bool supports_windows() const = 0;                           // window_register, window_deregister
  virtual std::string describe(NcclResult result, NcclComm comm) = 0;  // and what NCCL remembers of its last error

  virtual NcclResult get_unique_id(NcclUniqueId& id) = 0;
  // For the calling thread's current GPU.
  virtual NcclResult init_rank_config(NcclComm& comm, int size, const NcclUniqueId& id, int rank,
                                      NcclConfig& config) = 0;
  virtual NcclResult get_async_error(NcclComm comm, NcclResult& error) = 0;
  virtual NcclResult abort(NcclComm comm) = 0;  // ends what is on streams; the communicator is gone
  // What is on streams ends first; then destroy() is quick.
  virtual NcclResult finalize(NcclComm comm) = 0;
  virtual NcclResult destroy(NcclComm comm) = 0;

  // Calls between the two become one launch at the end. Groups belong to the calling thread.
  virtual NcclResult group_start() = 0;
  virtual NcclResult group_end() = 0;

  // Counts are elements: of each member's contribution, or of the result for reduce_scatter().
  virtual NcclResult all_reduce(const void* from, void* to, size_t count, NcclType type, NcclOp op, NcclComm comm,
                                Stream stream) = 0;
  virtual NcclResult reduce(const void* from, void* to, size_t count, NcclType type, NcclOp op, int root, NcclComm comm,
                            Stream stream) = 0;
  virtual NcclResult reduce_scatter(const void* from, void* to, size_t count, NcclType type, NcclOp op, NcclComm comm,
                                    Stream stream) = 0;
  virtual NcclResult all_gather(const void* from, void* to, size_t count, NcclType type, NcclComm comm,
                                Stream stream) = 0;
  virtual NcclResult broadcast(const void* from, void* to, size_t count, NcclType type, int root, NcclComm comm,
                               Stream stream) = 0;
  // Inside of groups only: each waits for its counterpart.
  virtual NcclResult send(const void* from, size_t count, NcclType type, int peer, NcclComm comm, Stream stream) = 0;
  virtual NcclResult recv(void* to, size_t count, NcclType type, int peer, NcclComm comm, Stream stream) = 0;

  // Device memory of the calling thread's current GPU that NCCL can reach directly.
  virtual NcclResult mem_alloc(void** memory, size_t bytes) = 0;
  virtual NcclResult mem_free(void* memory) = 0;
  // All members register memory of the same size, in the same order. A null window is no error: there is no direct way.
  virtual NcclResult window_register(NcclComm comm, void* memory, size_t bytes, NcclWindow& window, int flags) = 0;
  virtual NcclResult window_deregister(NcclComm comm, NcclWindow window) = 0;
};

}  // namespace fusewire
