#include "transport/fork_guard.h"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <memory>
#include <mutex>
#include <vector>

namespace fusewire {

struct ForkRegistry {
  std::mutex mutex;
  std::vector<int> descriptors;
  std::vector<ForkHook*> hooks;
  std::atomic<uint64_t> generation{0};

  // Never destroyed: an endpoint may be torn down by a static destructor that runs later than ours would.
  static ForkRegistry& get() {
    static ForkRegistry* const registry = [] {
      ForkRegistry* made = std::make_unique<ForkRegistry>().release();
      pthread_atfork([] { get().mutex.lock(); }, [] { get().mutex.unlock(); }, [] { get().in_child(); });
      return made;
    }();
    return *registry;
  }

  void in_child() noexcept {
    generation.fetch_add(1);
    for (const int fd : descriptors) ::close(fd);
    for (ForkHook* hook : hooks) hook->in_forked_child();
    descriptors.clear();
    hooks.clear();
    mutex.unlock();
  }
};

uint64_t fork_generation() { return ForkRegistry::get().generation.load(); }

void ForkHook::add_fork_hook() {
  ForkRegistry& registry = ForkRegistry::get();
  const std::lock_guard lock(registry.mutex);
  registry.hooks.push_back(this);
}

void ForkHook::remove_fork_hook() {
  ForkRegistry& registry = ForkRegistry::get();
  const std::lock_guard lock(registry.mutex);
  std::erase(registry.hooks, this);
}

Descriptor::Birth::Birth() { ForkRegistry::get().mutex.lock(); }

Descriptor::Birth::~Birth() {
  const int kept = errno;
  ForkRegistry::get().mutex.unlock();
  errno = kept;
}

void Descriptor::adopt(int fd) {
  fd_ = fd;
  if (fd < 0) return;
  ForkRegistry& registry = ForkRegistry::get();
  generation_ = registry.generation.load();
  registry.descriptors.push_back(fd);
}

void Descriptor::close() {
  const int fd = std::exchange(fd_, -1);
  if (fd < 0) return;
  ForkRegistry& registry = ForkRegistry::get();
  const std::lock_guard lock(registry.mutex);
  if (generation_ != registry.generation.load()) return;
  std::erase(registry.descriptors, fd);
  ::close(fd);
}

void Descriptor::close_in_child() noexcept {
  const int fd = std::exchange(fd_, -1);
  if (fd >= 0) ::close(fd);
}

}  // namespace fusewire
