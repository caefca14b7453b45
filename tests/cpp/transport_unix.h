// Helpers for tests of Unix endpoints: a job whose ranks are threads, ranks that are real processes, and what this
// process holds.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "common/error.h"
#include "transport/endpoint.h"

namespace fusewire::testing {

inline constexpr std::chrono::milliseconds kPatience{30000};  // only ever waited for by a test that fails

// All ranks in this process; [0] is the root's endpoint.
inline std::vector<std::unique_ptr<Endpoint>> make_unix_job(int size, const std::string& secret = "secret") {
  auto listener = listen_unix(size, secret);
  std::vector<std::future<std::unique_ptr<Endpoint>>> leaves;
  for (int rank = 1; rank < size; ++rank) {
    leaves.push_back(std::async(
        std::launch::async, [&, rank] { return connect_unix(listener->address(), rank, size, secret, kPatience); }));
  }
  std::vector<std::unique_ptr<Endpoint>> endpoints;
  endpoints.push_back(listener->accept_all(kPatience));
  for (auto& leaf : leaves) endpoints.push_back(leaf.get());
  return endpoints;
}

// The error that `action` throws; a test failure when it throws none.
inline Error error_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no error was thrown";
  return {ErrorCode::kInternal, "none"};
}

// Entries of /proc/self/fd or /proc/self/task.
inline int count_entries(const char* folder) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    (void)entry;
    ++count;
  }
  return count;
}
inline int open_descriptors() { return count_entries("/proc/self/fd"); }
inline int running_threads() { return count_entries("/proc/self/task"); }

// A forked process that runs `body` and exits with what it returns (1 after a failed expectation). It cannot outlive
// the test for long.
class Process {
 public:
  explicit Process(const std::function<int()>& body) : pid_(fork()) {
    if (pid_ != 0) return;
    alarm(60);
    int code = 2;
    try {
      code = body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "in a child: %s\n", error.what());
    }
    _exit(code == 0 && ::testing::Test::HasFailure() ? 1 : code);
  }
  ~Process() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Process(Process&& other) noexcept : pid_(std::exchange(other.pid_, -1)) {}
  Process& operator=(Process&&) = delete;

  pid_t pid() const { return pid_; }
  void send_signal(int number) const { kill(pid_, number); }
  int exit_code() {  // -signal when it was killed by one
    int status = 0;
    if (waitpid(std::exchange(pid_, -1), &status, 0) < 0) return 255;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  pid_t pid_;
};

// For one-byte messages between processes that share no endpoint (or no longer do).
class Pipe {
 public:
  Pipe() { EXPECT_EQ(pipe(ends_), 0); }
  ~Pipe() {
    close(ends_[0]);
    close(ends_[1]);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  void tell(char byte) const { EXPECT_EQ(write(ends_[1], &byte, 1), 1); }
  char hear() const {
    char byte = 0;
    return read(ends_[0], &byte, 1) == 1 ? byte : '\0';
  }

 private:
  int ends_[2] = {-1, -1};
};

}  // namespace fusewire::testing
