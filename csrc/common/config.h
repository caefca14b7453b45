// Everything a user can tune, in ONE struct. Environment variables are read once, by Config::from_environment; nothing
// else in Fusewire calls getenv for a knob. docs/tuning.md maps symptoms to these fields.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>

namespace fusewire {

enum class LogLevel : uint8_t { kTrace, kDebug, kInfo, kWarning, kError, kOff };

struct Config {
  // FUSEWIRE_FUSION_THRESHOLD (HOROVOD_FUSION_THRESHOLD), bytes: ready tensors gather into one bucket up to this size.
  int64_t fusion_threshold = 64LL << 20;

  // FUSEWIRE_CACHE_CAPACITY (HOROVOD_CACHE_CAPACITY), tensors: how many descriptions every rank remembers, so that a
  // tensor seen before is announced by a number. 0 turns the cache off.
  int64_t cache_capacity = 4096;

  // FUSEWIRE_STALL_CHECK_TIME (HOROVOD_STALL_CHECK_TIME_SECONDS), seconds: a tensor that some ranks have not submitted
  // for this long is reported, once per interval. 0 turns the report off (HOROVOD_STALL_CHECK_DISABLE=1 does too).
  double stall_check_seconds = 60.0;

  // FUSEWIRE_STALL_ABORT_TIME (HOROVOD_STALL_SHUTDOWN_TIME_SECONDS), seconds: after this long all ranks raise
  // StalledError with the report. 0 waits for ever.
  double stall_abort_seconds = 1800.0;

  // FUSEWIRE_TIMELINE (HOROVOD_TIMELINE), a path: every rank records what happens to a file of its own, see
  // docs/timeline.md. "{rank}" in it is the rank's number; without it the number is put before the extension. Empty (or
  // Horovod's "DYNAMIC"): off until start_timeline().
  std::string timeline;

  // FUSEWIRE_TIMELINE_MARK_CYCLES (HOROVOD_TIMELINE_MARK_CYCLES), 0 or 1: also mark when negotiation did something.
  bool timeline_mark_cycles = false;

  // FUSEWIRE_TIMELINE_LIMIT, bytes: a file that has grown to this size says so and is not written to any more. 0: none.
  int64_t timeline_limit = 256LL << 20;

  // FUSEWIRE_SPIN_US, microseconds: how long a thread with an operation pending looks again before it sleeps. The
  // default -1 means 20 where there are at least as many cores as local ranks, and 0 elsewhere.
  int64_t spin_us = -1;

  // FUSEWIRE_INLINE_LIMIT, bytes: a bucket up to this size is run by the coordinator thread itself; a larger one goes
  // to the executor thread so that negotiation goes on meanwhile. A thread that waits always runs buckets itself.
  int64_t inline_limit = 256LL << 10;

  // FUSEWIRE_SHM_CHUNK, bytes: size of one shared staging slot. 0 chooses by message size and free cores.
  int64_t shm_chunk = 0;

  // FUSEWIRE_BACKEND: "auto" (shared memory on one host), or the data plane's name: "shm" or "mpi".
  std::string backend = "auto";

  // FUSEWIRE_GPU_BACKEND: how CUDA tensors travel. "auto" (NCCL where all ranks can use it, host staging elsewhere),
  // "nccl" (an error where it cannot be used) or "staged" (through host memory, by the data plane for CPU tensors).
  std::string gpu_backend = "auto";

  // NCCL_MULTI_RANK_GPU_ENABLE, NCCL's own knob, only looked at: 1 lets ranks share a GPU where NCCL knows how to.
  bool nccl_shares_gpus = false;

  // FUSEWIRE_MPI_MODULE, a path: the module that calls MPI, where it is not the one built with Fusewire but, say, one
  // for another MPI. "" is the one beside the extension.
  std::string mpi_module;

  // FUSEWIRE_LOG_LEVEL (HOROVOD_LOG_LEVEL): trace, debug, info, warning, error or off.
  LogLevel log_level = LogLevel::kWarning;

  // `get` looks a variable up (std::getenv in production, a map in tests). Throws Error(kInvalidArgument) that names
  // the variable, its value and what is allowed.
  using Lookup = std::function<std::optional<std::string>(const std::string&)>;
  static Config from_environment(const Lookup& get);
  static Config from_environment();

  // Sets one field by its keyword ("fusion_threshold", "stall_check_time", ...), as init(**kwargs) does. Same errors.
  void set(const std::string& keyword, const std::string& value);
};

}  // namespace fusewire
