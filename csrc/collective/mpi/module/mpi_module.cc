// The real MPI behind the seam. The only file that includes mpi.h, and a library of its own, so that Fusewire neither
// needs MPI to be built nor loads it unless it is wanted.
#include <mpi.h>

#include <algorithm>
#include <cstring>

#include "collective/mpi/mpi_api.h"

namespace fusewire {
namespace {

template <typename Ours, typename Theirs>
Ours pack(Theirs handle) {
  static_assert(sizeof(Theirs) <= sizeof(uint64_t));
  Ours ours;
  std::memcpy(&ours.bits, &handle, sizeof(handle));
  return ours;
}

template <typename Theirs, typename Ours>
Theirs unpack(const Ours& ours) {
  Theirs handle;
  std::memcpy(&handle, &ours.bits, sizeof(handle));
  return handle;
}

MPI_Comm theirs(const MpiComm& comm) { return unpack<MPI_Comm>(comm); }

MpiThreads level_of(int provided) {
  switch (provided) {
    case MPI_THREAD_MULTIPLE:
      return MpiThreads::kMultiple;
    case MPI_THREAD_SERIALIZED:
      return MpiThreads::kSerialized;
    case MPI_THREAD_FUNNELED:
      return MpiThreads::kFunneled;
    default:
      return MpiThreads::kSingle;
  }
}

int number_of(MpiThreads level) {
  constexpr int kNumbers[] = {MPI_THREAD_SINGLE, MPI_THREAD_FUNNELED, MPI_THREAD_SERIALIZED, MPI_THREAD_MULTIPLE};
  return kNumbers[static_cast<int>(level)];
}

class RealMpi final : public MpiApi {
 public:
  std::string library() override {
    char text[MPI_MAX_LIBRARY_VERSION_STRING] = {};
    int length = 0;
    MPI_Get_library_version(text, &length);
    std::string line(text, static_cast<size_t>(std::clamp<int>(length, 0, MPI_MAX_LIBRARY_VERSION_STRING - 1)));
    line.resize(std::min(line.find_first_of("\n,"), line.size()));
    std::replace(line.begin(), line.end(), '\t', ' ');
    return line;
  }

  bool initialized() override {
    int flag = 0;
    MPI_Initialized(&flag);
    return flag != 0;
  }

  bool finalized() override {
    int flag = 0;
    MPI_Finalized(&flag);
    return flag != 0;
  }

  int initialize(MpiThreads wanted, MpiThreads& got) override {
    int provided = MPI_THREAD_SINGLE;
    const int error = MPI_Init_thread(nullptr, nullptr, number_of(wanted), &provided);
    got = level_of(provided);
    return error;
  }

  int finalize() override { return MPI_Finalize(); }

  int query_threads(MpiThreads& level) override {
    int provided = MPI_THREAD_SINGLE;
    const int error = MPI_Query_thread(&provided);
    level = level_of(provided);
    return error;
  }

  int world(int& rank, int& size) override {
    const int error = MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    return error != MPI_SUCCESS ? error : MPI_Comm_size(MPI_COMM_WORLD, &size);
  }

  std::string describe(int error) override {
    char text[MPI_MAX_ERROR_STRING] = {};
    int length = 0;
    if (MPI_Error_string(error, text, &length) != MPI_SUCCESS) return "error " + std::to_string(error);
    return std::string(text, static_cast<size_t>(length));
  }

  int duplicate_world(MpiComm& comm, MpiRequest& request) override {
    // MPI writes the new handle when the request completes, so it needs a place that stays.
    MPI_Request started = MPI_REQUEST_NULL;
    const int error = MPI_Comm_idup(MPI_COMM_WORLD, reinterpret_cast<MPI_Comm*>(&comm.bits), &started);
    request = pack<MpiRequest>(started);
    return error;
  }

  int return_errors(MpiComm comm) override { return MPI_Comm_set_errhandler(theirs(comm), MPI_ERRORS_RETURN); }

  int free(MpiComm& comm) override {
    MPI_Comm handle = theirs(comm);
    const int error = MPI_Comm_free(&handle);
    comm = {};
    return error;
  }

  int gather_all(const void* mine, void* all, int bytes, MpiComm comm, MpiRequest& request) override {
    MPI_Request started = MPI_REQUEST_NULL;
    const int error = MPI_Iallgather(mine, bytes, MPI_BYTE, all, bytes, MPI_BYTE, theirs(comm), &started);
    request = pack<MpiRequest>(started);
    return error;
  }

  int send(const void* data, int bytes, int peer, int tag, MpiComm comm, MpiRequest& request) override {
    MPI_Request started = MPI_REQUEST_NULL;
    const int error = MPI_Isend(data, bytes, MPI_BYTE, peer, tag, theirs(comm), &started);
    request = pack<MpiRequest>(started);
    return error;
  }

  int receive(void* data, int bytes, int peer, int tag, MpiComm comm, MpiRequest& request) override {
    MPI_Request started = MPI_REQUEST_NULL;
    const int error = MPI_Irecv(data, bytes, MPI_BYTE, peer, tag, theirs(comm), &started);
    request = pack<MpiRequest>(started);
    return error;
  }

  int test_some(std::span<MpiRequest> requests, std::vector<int>& finished) override {
    // One caller at a time uses this (MpiProcess), but several engines may: a thread's own copies.
    thread_local std::vector<MPI_Request> handles;
    handles.clear();
    for (const MpiRequest& request : requests) handles.push_back(unpack<MPI_Request>(request));
    finished.resize(requests.size());
    int count = 0;
    const int error =
        MPI_Testsome(static_cast<int>(handles.size()), handles.data(), &count, finished.data(), MPI_STATUSES_IGNORE);
    finished.resize(count == MPI_UNDEFINED || error != MPI_SUCCESS ? 0 : static_cast<size_t>(count));
    for (size_t i = 0; i < handles.size(); ++i) requests[i] = pack<MpiRequest>(handles[i]);
    return error;
  }

  int cancel(MpiRequest& request) override {
    MPI_Request handle = unpack<MPI_Request>(request);
    return MPI_Cancel(&handle);
  }

  int release(MpiRequest& request) override {
    MPI_Request handle = unpack<MPI_Request>(request);
    request = {};
    return handle == MPI_REQUEST_NULL ? MPI_SUCCESS : MPI_Request_free(&handle);
  }
};

}  // namespace
}  // namespace fusewire

extern "C" {

__attribute__((visibility("default"))) int fusewire_mpi_module_version() { return fusewire::kMpiModuleVersion; }

__attribute__((visibility("default"))) fusewire::MpiApi* fusewire_mpi_make_api() {
  static fusewire::RealMpi api;  // one library, one process
  return &api;
}

}  // extern "C"
