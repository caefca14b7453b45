#include "collective/mpi/mpi_process.h"

#include <exception>

#include "common/error.h"
#include "common/thread.h"

namespace fusewire {
namespace {

constexpr std::chrono::milliseconds kForEver{-1};

}  // namespace

std::string to_string(MpiThreads threads) {
  switch (threads) {
    case MpiThreads::kSingle:
      return "MPI_THREAD_SINGLE";
    case MpiThreads::kFunneled:
      return "MPI_THREAD_FUNNELED";
    case MpiThreads::kSerialized:
      return "MPI_THREAD_SERIALIZED";
    case MpiThreads::kMultiple:
      return "MPI_THREAD_MULTIPLE";
  }
  return "?";
}

void check_mpi(MpiApi& api, int error, const char* call) {
  if (error == 0) [[likely]]
    return;
  throw Error(ErrorCode::kCollective, std::string("MPI: ") + call + " failed: " + api.describe(error));
}

MpiProcess::~MpiProcess() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

void MpiProcess::start() {
  const std::lock_guard turn(turn_);
  if (api_.finalized()) {
    throw Error(ErrorCode::kInvalidArgument,
                "MPI was finalised in this process (by MPI_Finalize of the script?) and cannot be started again; use "
                "another data plane (FUSEWIRE_BACKEND=auto)");
  }
  if (started_) return;
  if (api_.initialized()) {
    check_mpi(api_, api_.query_threads(threads_), "MPI_Query_thread");
    if (threads_ < MpiThreads::kSerialized) {
      throw Error(ErrorCode::kInvalidArgument,
                  "this process has initialised MPI with " + to_string(threads_) +
                      ", so that only its main thread may call MPI; Fusewire has threads of its own. Ask for "
                      "MPI_THREAD_MULTIPLE (mpi4py does by itself), or call fusewire.init() first");
    }
    if (one_thread()) thread_ = start_thread("fw-mpi", [this] { thread_main(); });
  } else {
    thread_ = start_thread("fw-mpi", [this] { thread_main(); });
    bool ended = false;
    on_thread([this] { enter(); }, kForEver, ended);
  }
  started_ = true;
}

void MpiProcess::enter() {
  check_mpi(api_, api_.initialize(MpiThreads::kMultiple, threads_), "MPI_Init_thread");
  ours_ = true;
}

void MpiProcess::call(const std::function<void()>& work) {
  if (!one_thread()) return work();
  const std::lock_guard turn(turn_);
  bool ended = false;
  on_thread(work, kForEver, ended);
}

void MpiProcess::note_abandoned() {
  const std::lock_guard lock(mutex_);
  abandoned_ = true;
}

bool MpiProcess::finish(std::chrono::milliseconds patience) {
  const std::lock_guard turn(turn_);
  {
    const std::lock_guard lock(mutex_);
    if (!ours_ || abandoned_ || api_.finalized()) return false;
    abandoned_ = true;  // tried once
  }
  bool ended = false;
  on_thread([this] { check_mpi(api_, api_.finalize(), "MPI_Finalize"); }, patience, ended);
  return ended;
}

void MpiProcess::on_thread(const std::function<void()>& work, std::chrono::milliseconds patience, bool& ended) {
  const auto error = std::make_shared<std::exception_ptr>();  // the job may outlive our patience
  std::unique_lock lock(mutex_);
  busy_ = true;
  job_ = [work, error] {
    try {
      work();
    } catch (...) {
      *error = std::current_exception();
    }
  };
  wake_.notify_one();
  if (patience == kForEver) {
    done_.wait(lock, [this] { return !busy_; });
  } else if (!done_.wait_for(lock, patience, [this] { return !busy_; })) {
    return;
  }
  ended = true;
  if (*error) std::rethrow_exception(*error);
}

void MpiProcess::thread_main() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || job_; });
    if (!job_) return;
    const std::function<void()> job = std::move(job_);
    job_ = nullptr;
    lock.unlock();
    job();
    lock.lock();
    busy_ = false;
    done_.notify_all();
  }
}

}  // namespace fusewire
