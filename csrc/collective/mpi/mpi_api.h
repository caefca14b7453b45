// The seam to MPI: the few calls that Fusewire makes, one method each, so that order, arguments, errors and silence are
// tested on machines without MPI. The real one is a library of its own (module/), loaded only when it is wanted:
// nothing else in Fusewire sees mpi.h. Methods return MPI's error code, 0 for success, unless said otherwise.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace fusewire {

// Handles as MPI's own, which are pointers in one library and numbers in another.
struct MpiComm {
  uint64_t bits = 0;
};
struct MpiRequest {
  uint64_t bits = 0;
};

enum class MpiThreads : uint8_t { kSingle, kFunneled, kSerialized, kMultiple };
std::string to_string(MpiThreads threads);  // "MPI_THREAD_MULTIPLE"

class MpiApi {
 public:
  virtual ~MpiApi() = default;

  // At any time, from any thread.
  virtual std::string library() = 0;  // the library's own words, in one line
  virtual bool initialized() = 0;
  virtual bool finalized() = 0;

  virtual int initialize(MpiThreads wanted, MpiThreads& got) = 0;
  virtual int finalize() = 0;
  virtual int query_threads(MpiThreads& level) = 0;
  virtual int world(int& rank, int& size) = 0;
  virtual std::string describe(int error) = 0;

  // Collective over MPI_COMM_WORLD. `comm` may be used once the request has completed and return_errors() was called.
  virtual int duplicate_world(MpiComm& comm, MpiRequest& request) = 0;
  virtual int return_errors(MpiComm comm) = 0;  // errors on it become return values
  virtual int free(MpiComm& comm) = 0;

  // Everybody's `bytes` bytes at `mine`, in the order of ranks, to `all`.
  virtual int gather_all(const void* mine, void* all, int bytes, MpiComm comm, MpiRequest& request) = 0;

  virtual int send(const void* data, int bytes, int peer, int tag, MpiComm comm, MpiRequest& request) = 0;
  virtual int receive(void* data, int bytes, int peer, int tag, MpiComm comm, MpiRequest& request) = 0;

  // Puts the indices of those that have completed into `finished`, without waiting; such a request is gone. This is
  // where MPI makes progress.
  virtual int test_some(std::span<MpiRequest> requests, std::vector<int>& finished) = 0;

  virtual int cancel(MpiRequest& request) = 0;   // of a receive; it must still be tested or released
  virtual int release(MpiRequest& request) = 0;  // whatever becomes of it
};

// What the module exports, under this name, with this version: a module of another build is refused.
inline constexpr int kMpiModuleVersion = 1;
inline constexpr const char* kMpiModuleVersionSymbol = "fusewire_mpi_module_version";  // int()
inline constexpr const char* kMpiModuleMakeSymbol = "fusewire_mpi_make_api";           // MpiApi*(), owned by nobody

}  // namespace fusewire
