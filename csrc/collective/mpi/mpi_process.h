// This process's MPI: who initialised it, which threads may call it, and who finalises it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "collective/mpi/mpi_api.h"

namespace fusewire {

// Note [Threads that call MPI]
// Buckets run on whichever thread drives the engine, which MPI allows under MPI_THREAD_MULTIPLE alone (the user may
// call MPI as well). Where the library gives less, one thread, "fw-mpi", makes every call, and run() waits for it. It
// is also the one that initialises MPI, if nobody has, and that finalises it, because MPI wants that to be one thread.
// An MPI that somebody has initialised below MPI_THREAD_SERIALIZED cannot be used: its main thread belongs to somebody
// else.
class MpiProcess {
 public:
  explicit MpiProcess(MpiApi& api) : api_(api) {}
  ~MpiProcess();  // joins the thread; does not finalise
  MpiProcess(const MpiProcess&) = delete;
  MpiProcess& operator=(const MpiProcess&) = delete;

  // Initialises MPI, or finds it initialised. Throws Error(kInvalidArgument) where it cannot be used. Idempotent.
  void start();

  // Finalises MPI if start() initialised it and nothing was abandoned; false when that did not end within `patience`
  // (a peer that has died cannot answer) or was not tried.
  bool finish(std::chrono::milliseconds patience);

  // Some request was given up: MPI may wait for it for ever in MPI_Finalize.
  void note_abandoned();

  // Runs `work` where MPI may be called, and waits for it. Rethrows.
  void call(const std::function<void()>& work);

  MpiApi& api() { return api_; }
  MpiThreads threads() const { return threads_; }
  bool ours() const { return ours_; }  // start() has initialised it
  bool one_thread() const { return threads_ != MpiThreads::kMultiple; }

 private:
  void enter();
  void on_thread(const std::function<void()>& work, std::chrono::milliseconds patience, bool& ended);
  void thread_main();

  MpiApi& api_;
  MpiThreads threads_ = MpiThreads::kMultiple;
  bool started_ = false;
  bool ours_ = false;
  bool abandoned_ = false;

  // A leaf lock. One job at a time: whoever calls holds `turn_` until its job has ended.
  std::mutex turn_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  std::function<void()> job_;
  bool busy_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

// Throws Error(kCollective) that says which call failed and in MPI's words why.
void check_mpi(MpiApi& api, int error, const char* call);

}  // namespace fusewire
