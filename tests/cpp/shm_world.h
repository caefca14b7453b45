// Ranks of one shared-memory set as threads of this process or as forked processes, and tensors whose values everybody
// can compute.
#pragma once

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "collective/shm.h"
#include "kernels/kernels.h"

namespace fusewire::testing {

// A body returns "" or what went wrong on its rank.
using RankBody = std::function<std::string(int rank, Backend& backend)>;

class SharedPages {
 public:
  explicit SharedPages(size_t bytes)
      : bytes_(bytes), data_(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {}
  ~SharedPages() { munmap(data_, bytes_); }
  SharedPages(const SharedPages&) = delete;
  SharedPages& operator=(const SharedPages&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  size_t bytes_;
  void* data_;
};

// Zero-filled memory of this process alone, aligned like a mapping.
class HeapRegion {
 public:
  explicit HeapRegion(size_t bytes) : storage_(bytes + kPage) {}
  std::byte* data() {
    const auto address = reinterpret_cast<uintptr_t>(storage_.data());
    return storage_.data() + (kPage - address % kPage) % kPage;
  }

 private:
  static constexpr size_t kPage = 4096;
  std::vector<std::byte> storage_;
};

inline std::string join_faults(const std::vector<std::string>& faults) {
  std::string text;
  for (size_t rank = 0; rank < faults.size(); ++rank) {
    if (!faults[rank].empty()) text += "rank " + std::to_string(rank) + ": " + faults[rank] + "\n";
  }
  return text;
}

// "" when every rank was content.
inline std::string run_threads(int size, ShmOptions options, const RankBody& body) {
  HeapRegion region(shm_region_bytes(size));
  std::vector<std::string> faults(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  options.size = size;
  for (int rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      ShmOptions mine = options;
      mine.rank = rank;
      const auto backend = make_shm_backend(region.data(), mine);
      try {
        faults[static_cast<size_t>(rank)] = body(rank, *backend);
        if (!faults[static_cast<size_t>(rank)].empty()) backend->abort();  // the others need not wait for this rank
      } catch (const std::exception& error) {
        faults[static_cast<size_t>(rank)] = std::string("threw ") + error.what();
        backend->abort();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return join_faults(faults);
}

inline std::string run_processes(int size, ShmOptions options, const RankBody& body) {
  constexpr size_t kText = 512;
  SharedPages region(shm_region_bytes(size));
  SharedPages texts(kText * static_cast<size_t>(size));
  std::vector<pid_t> children;
  options.size = size;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) {
      ShmOptions mine = options;
      mine.rank = rank;
      const auto backend = make_shm_backend(region.data(), mine);
      std::string fault;
      try {
        fault = body(rank, *backend);
        if (!fault.empty()) backend->abort();
      } catch (const std::exception& error) {
        fault = std::string("threw ") + error.what();
        backend->abort();
      }
      std::snprintf(reinterpret_cast<char*>(texts.data()) + kText * static_cast<size_t>(rank), kText, "%s",
                    fault.c_str());
      _exit(0);
    }
    children.push_back(pid);
  }
  std::vector<std::string> faults;
  for (int rank = 0; rank < size; ++rank) {
    int status = 0;
    waitpid(children[static_cast<size_t>(rank)], &status, 0);
    faults.emplace_back(reinterpret_cast<const char*>(texts.data()) + kText * static_cast<size_t>(rank));
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) faults.back() += " died";
  }
  return join_faults(faults);
}

}  // namespace fusewire::testing
