// What a forked child must not inherit: the descriptors and the shared memory of the endpoints alive in its parent.
#pragma once

#include <cstdint>
#include <utility>

namespace fusewire {

// Note [Fork]
// A forked child (a DataLoader worker, say) that kept its parent's sockets would keep them open when the parent is
// killed, and nobody would notice the death. So every descriptor of this folder is born and registered under one lock
// that fork() takes too (pthread_atfork), and the child closes all of them before fork() returns there, then lets every
// ForkHook forget what it had. Shared mappings are MADV_DONTFORK: the child does not have them. Objects of the parent
// that are destroyed in the child do nothing, because the fork generation they were made in has passed: the numbers
// they hold may already mean something else. Descriptors are close-on-exec as well, for posix_spawn and vfork.
//
// Lock order: the registry's lock is the innermost one; nothing else is taken under it.
uint64_t fork_generation();  // how many forks lie between the first process and this one

// Something that outlives fork() in the child's copy of memory. Register it when it is complete.
class ForkHook {
 public:
  ForkHook() = default;
  ForkHook(const ForkHook&) = delete;
  ForkHook& operator=(const ForkHook&) = delete;

 protected:
  ~ForkHook() = default;
  void add_fork_hook();
  void remove_fork_hook();

 private:
  friend struct ForkRegistry;
  // In the child, on its only thread, with the registry's lock held: take no lock, start nothing.
  virtual void in_forked_child() noexcept = 0;
};

// An owned file descriptor that no forked child keeps.
class Descriptor {
 public:
  Descriptor() = default;
  // `open` makes a descriptor, without blocking, and returns it, or -1 with errno set.
  template <class Open>
  static Descriptor make(Open&& open) {
    const Birth birth;
    Descriptor made;
    made.adopt(std::forward<Open>(open)());
    return made;
  }
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)), generation_(other.generation_) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    if (this != &other) {
      close();
      fd_ = std::exchange(other.fd_, -1);
      generation_ = other.generation_;
    }
    return *this;
  }
  ~Descriptor() { close(); }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  void close();
  // For a child that was made without the fork handlers (_Fork): closes without the lock.
  void close_in_child() noexcept;

 private:
  struct Birth {  // holds the registry's lock
    Birth();
    ~Birth();
    Birth(const Birth&) = delete;
    Birth& operator=(const Birth&) = delete;
  };
  void adopt(int fd);

  int fd_ = -1;
  uint64_t generation_ = 0;
};

}  // namespace fusewire
