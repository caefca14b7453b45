#include "collective/mpi/mpi_loader.h"

#include <dlfcn.h>
#include <unistd.h>

#include <mutex>

#include "common/error.h"

namespace fusewire {
namespace {

constexpr const char* kModuleName = "_mpi.so";

// Where this code has been loaded from.
std::string own_folder() {
  Dl_info info;
  if (dladdr(reinterpret_cast<const void*>(&own_folder), &info) == 0 || info.dli_fname == nullptr) return ".";
  const std::string path = info.dli_fname;
  const size_t slash = path.rfind('/');
  return slash == std::string::npos ? "." : path.substr(0, slash);
}

std::string dl_error() {
  const char* text = dlerror();
  return text != nullptr ? text : "no reason given";
}

// Loaded once and never unloaded: MPI keeps threads and handlers.
struct Loaded {
  std::mutex mutex;
  MpiProcess* process = nullptr;

  static Loaded& instance() {
    static Loaded& loaded = *std::make_unique<Loaded>().release();
    return loaded;
  }

  // Under the mutex. Null, and why, where it does not work.
  MpiProcess* load(const std::string& module, std::string& problem, bool& built) {
    built = true;
    if (process != nullptr) return process;
    const std::string path = module.empty() ? own_folder() + "/" + kModuleName : module;
    if (access(path.c_str(), F_OK) != 0) {
      built = false;
      problem = "there is no " + path + ": Fusewire was built without MPI (no mpicxx was found then)";
      return nullptr;
    }
    // Open MPI loads parts of itself later, and older ones look for symbols of libmpi in the global scope.
    void* const library = dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL | RTLD_NODELETE);
    if (library == nullptr) {
      problem = "the MPI module cannot be loaded: " + dl_error();
      return nullptr;
    }
    const auto version = reinterpret_cast<int (*)()>(dlsym(library, kMpiModuleVersionSymbol));
    const auto make = reinterpret_cast<MpiApi* (*)()>(dlsym(library, kMpiModuleMakeSymbol));
    if (version == nullptr || make == nullptr || version() != kMpiModuleVersion) {
      problem = path + " belongs to another version of Fusewire; build both together";
      return nullptr;
    }
    return process = std::make_unique<MpiProcess>(*make()).release();
  }
};

}  // namespace

MpiProcess& mpi_process(const std::string& module) {
  Loaded& loaded = Loaded::instance();
  const std::lock_guard lock(loaded.mutex);
  std::string problem;
  bool built = false;
  MpiProcess* const process = loaded.load(module, problem, built);
  if (process == nullptr) throw Error(ErrorCode::kInvalidArgument, "the MPI backend cannot be used: " + problem);
  return *process;
}

MpiFacts mpi_facts(const std::string& module) {
  Loaded& loaded = Loaded::instance();
  const std::lock_guard lock(loaded.mutex);
  MpiFacts facts;
  MpiProcess* const process = loaded.load(module, facts.problem, facts.built);
  if (process == nullptr) return facts;
  MpiApi& api = process->api();
  facts.library = api.library();
  facts.started = api.initialized() && !api.finalized();
  MpiThreads level = MpiThreads::kSingle;
  if (facts.started && api.query_threads(level) == 0) facts.threads = to_string(level);
  return facts;
}

void finish_mpi(std::chrono::milliseconds patience) {
  Loaded& loaded = Loaded::instance();
  const std::lock_guard lock(loaded.mutex);
  if (loaded.process != nullptr) loaded.process->finish(patience);
}

}  // namespace fusewire
