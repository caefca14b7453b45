#include "collective/nccl/nccl_loader.h"

#include <dlfcn.h>

#include <mutex>
#include <utility>

namespace fusewire {
namespace {

constexpr const char* kName = "libnccl.so.2";

NcclResult result(int code) { return static_cast<NcclResult>(code); }
int code(NcclType type) { return static_cast<int>(type); }
int code(NcclOp op) { return static_cast<int>(op); }

class LoadedNccl final : public NcclApi {
 public:
  LoadedNccl(const NcclFunctions& functions, int version) : f_(functions), version_(version) {}

  int version() const override { return version_; }
  bool supports_memory() const override { return f_.ncclMemAlloc != nullptr && f_.ncclMemFree != nullptr; }
  bool supports_windows() const override {
    return supports_memory() && f_.ncclCommWindowRegister != nullptr && f_.ncclCommWindowDeregister != nullptr;
  }
  std::string describe(NcclResult error, NcclComm comm) override {
    std::string text = f_.ncclGetErrorString(static_cast<int>(error));
    const char* const last = f_.ncclGetLastError(comm);
    if (last != nullptr && *last != '\0') text += std::string(" (last error: ") + last + ")";
    return text;
  }

  NcclResult get_unique_id(NcclUniqueId& id) override { return result(f_.ncclGetUniqueId(&id)); }
  NcclResult init_rank_config(NcclComm& comm, int size, const NcclUniqueId& id, int rank, NcclConfig& config) override {
    return result(f_.ncclCommInitRankConfig(&comm, size, id, rank, &config));
  }
  NcclResult get_async_error(NcclComm comm, NcclResult& error) override {
    int async = 0;
    const int got = f_.ncclCommGetAsyncError(comm, &async);
    error = result(async);
    return result(got);
  }
  NcclResult abort(NcclComm comm) override { return result(f_.ncclCommAbort(comm)); }
  NcclResult finalize(NcclComm comm) override { return result(f_.ncclCommFinalize(comm)); }
  NcclResult destroy(NcclComm comm) override { return result(f_.ncclCommDestroy(comm)); }
  NcclResult group_start() override { return result(f_.ncclGroupStart()); }
  NcclResult group_end() override { return result(f_.ncclGroupEnd()); }

  NcclResult all_reduce(const void* from, void* to, size_t count, NcclType type, NcclOp op, NcclComm comm,
                        Stream stream) override {
    return result(f_.ncclAllReduce(from, to, count, code(type), code(op), comm, stream));
  }
  NcclResult reduce(const void* from, void* to, size_t count, NcclType type, NcclOp op, int root, NcclComm comm,
                    Stream stream) override {
    return result(f_.ncclReduce(from, to, count, code(type), code(op), root, comm, stream));
  }
  NcclResult reduce_scatter(const void* from, void* to, size_t count, NcclType type, NcclOp op, NcclComm comm,
                            Stream stream) override {
    return result(f_.ncclReduceScatter(from, to, count, code(type), code(op), comm, stream));
  }
  NcclResult all_gather(const void* from, void* to, size_t count, NcclType type, NcclComm comm,
                        Stream stream) override {
    return result(f_.ncclAllGather(from, to, count, code(type), comm, stream));
  }
  NcclResult broadcast(const void* from, void* to, size_t count, NcclType type, int root, NcclComm comm,
                       Stream stream) override {
    return result(f_.ncclBroadcast(from, to, count, code(type), root, comm, stream));
  }
  NcclResult send(const void* from, size_t count, NcclType type, int peer, NcclComm comm, Stream stream) override {
    return result(f_.ncclSend(from, count, code(type), peer, comm, stream));
  }
  NcclResult recv(void* to, size_t count, NcclType type, int peer, NcclComm comm, Stream stream) override {
    return result(f_.ncclRecv(to, count, code(type), peer, comm, stream));
  }

  NcclResult mem_alloc(void** memory, size_t bytes) override { return result(f_.ncclMemAlloc(memory, bytes)); }
  NcclResult mem_free(void* memory) override { return result(f_.ncclMemFree(memory)); }
  NcclResult window_register(NcclComm comm, void* memory, size_t bytes, NcclWindow& window, int flags) override {
    return result(f_.ncclCommWindowRegister(comm, memory, bytes, &window, flags));
  }
  NcclResult window_deregister(NcclComm comm, NcclWindow window) override {
    return result(f_.ncclCommWindowDeregister(comm, window));
  }

 private:
  const NcclFunctions f_;
  const int version_;
};

// Looks functions up in one library and remembers what is missing.
struct Lookup {
  void* library;
  std::string missing{};

  template <typename Function>
  void optional(Function& function, const char* name) {
    function = reinterpret_cast<Function>(dlsym(library, name));
  }
  template <typename Function>
  void needed(Function& function, const char* name) {
    optional(function, name);
    if (function == nullptr) missing += (missing.empty() ? "" : ", ") + std::string(name);
  }
};

std::string path_of(const void* function) {
  Dl_info info;
  return dladdr(function, &info) != 0 && info.dli_fname != nullptr ? info.dli_fname : "";
}

// Also what makes the second one to open: two NCCLs in one process would each keep a proxy, and torch's would not know
// of ours.
void* open_library(const std::string& name, std::string& problem) {
  void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
  if (library == nullptr) {
    const char* const text = dlerror();
    problem = "torch has not loaded " + name + " and it is not found either" + (text ? std::string(": ") + text : "");
  }
  return library;
}

// Loaded once and never unloaded: NCCL keeps threads.
struct Found {
  std::mutex mutex;
  NcclLibrary library{};

  static Found& instance() {
    static Found& found = *std::make_unique<Found>().release();
    return found;
  }
  void look() {
    if (!library.api) library = open_nccl(kName);
  }
};

}  // namespace

std::string nccl_version_text(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

NcclLibrary open_nccl(const std::string& name) {
  NcclLibrary opened;
  NcclFacts& facts = opened.facts;
  void* const library = open_library(name, facts.problem);
  if (library == nullptr) return opened;
  NcclFunctions f{};
  Lookup look{library};
  look.needed(f.ncclGetVersion, "ncclGetVersion");
  if (f.ncclGetVersion != nullptr) {
    facts.path = path_of(reinterpret_cast<const void*>(f.ncclGetVersion));
    static_cast<void>(f.ncclGetVersion(&facts.version));
    if (facts.version < kNcclOldest || facts.version >= kNcclTooNew) {
      // Codes before 2.9 had another form; "before 2.19" is all that need be said of them.
      facts.problem = facts.path + " is NCCL " +
                      (facts.version < 10000 ? "before 2.9" : nccl_version_text(facts.version)) +
                      "; Fusewire needs 2.19 or later, and knows none after 2";
      return opened;
    }
  }
#define FUSEWIRE_LOOK(how, name) look.how(f.name, #name)
  FUSEWIRE_LOOK(needed, ncclGetErrorString);
  FUSEWIRE_LOOK(needed, ncclGetLastError);
  FUSEWIRE_LOOK(needed, ncclGetUniqueId);
  FUSEWIRE_LOOK(needed, ncclCommInitRankConfig);
  FUSEWIRE_LOOK(needed, ncclCommGetAsyncError);
  FUSEWIRE_LOOK(needed, ncclCommAbort);
  FUSEWIRE_LOOK(needed, ncclCommFinalize);
  FUSEWIRE_LOOK(needed, ncclCommDestroy);
  FUSEWIRE_LOOK(needed, ncclGroupStart);
  FUSEWIRE_LOOK(needed, ncclGroupEnd);
  FUSEWIRE_LOOK(needed, ncclAllReduce);
  FUSEWIRE_LOOK(needed, ncclReduce);
  FUSEWIRE_LOOK(needed, ncclReduceScatter);
  FUSEWIRE_LOOK(needed, ncclAllGather);
  FUSEWIRE_LOOK(needed, ncclBroadcast);
  FUSEWIRE_LOOK(needed, ncclSend);
  FUSEWIRE_LOOK(needed, ncclRecv);
  FUSEWIRE_LOOK(optional, ncclMemAlloc);
  FUSEWIRE_LOOK(optional, ncclMemFree);
  FUSEWIRE_LOOK(optional, ncclCommWindowRegister);
  FUSEWIRE_LOOK(optional, ncclCommWindowDeregister);
#undef FUSEWIRE_LOOK
  if (!look.missing.empty()) {
    facts.problem = (facts.path.empty() ? name : facts.path) + " lacks " + look.missing;
    return opened;
  }
  opened.api = std::make_unique<LoadedNccl>(f, facts.version);
  const std::string lacks = "NCCL " + nccl_version_text(facts.version) + " has no ";
  facts.features = {
      {"memory of NCCL's own", opened.api->supports_memory() ? "" : lacks + "ncclMemAlloc"},
      {"symmetric windows", opened.api->supports_windows() ? "" : lacks + "ncclCommWindowRegister (2.27 and later)"}};
  return opened;
}

NcclApi* find_nccl(std::string* why_not) {
  Found& found = Found::instance();
  const std::lock_guard lock(found.mutex);
  found.look();
  if (why_not != nullptr) *why_not = found.library.facts.problem;
  return found.library.api.get();
}

NcclFacts nccl_facts() {
  Found& found = Found::instance();
  const std::lock_guard lock(found.mutex);
  found.look();
  return found.library.facts;
}

}  // namespace fusewire
