#include "common/config.h"

#include <array>
#include <charconv>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "common/error.h"

namespace fusewire {
namespace {

[[noreturn]] void reject(const std::string& where, const std::string& value, const std::string& allowed) {
  throw Error(ErrorCode::kInvalidArgument, where + "=" + value + " is not valid; allowed: " + allowed);
}

int64_t parse_integer(const std::string& where, const std::string& value, int64_t least, int64_t most) {
  int64_t number = 0;
  const char* end = value.data() + value.size();
  const auto [stopped, error] = std::from_chars(value.data(), end, number);
  if (error != std::errc() || stopped != end || number < least || number > most) {
    reject(where, value, "a whole number from " + std::to_string(least) + " to " + std::to_string(most));
  }
  return number;
}

double parse_seconds(const std::string& where, const std::string& value) {
  // Far below what a count of nanoseconds can hold, so that nobody has to think of overflow again.
  constexpr double kMost = 1e9;
  double number = 0;
  const char* end = value.data() + value.size();
  const auto [stopped, error] = std::from_chars(value.data(), end, number);
  if (error != std::errc() || stopped != end || !(number >= 0 && number <= kMost)) {
    reject(where, value, "seconds from 0 (off) to 1000000000");
  }
  return number;
}

// Horovod's names in any case, "fatal" among them, are levels here too.
LogLevel parse_level(const std::string& where, const std::string& value) {
  static constexpr std::array<std::pair<std::string_view, LogLevel>, 7> kLevels = {{
      {"trace", LogLevel::kTrace},
      {"debug", LogLevel::kDebug},
      {"info", LogLevel::kInfo},
      {"warning", LogLevel::kWarning},
      {"error", LogLevel::kError},
      {"fatal", LogLevel::kError},
      {"off", LogLevel::kOff},
  }};
  std::string lower = value;
  for (char& c : lower) {
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  }
  for (const auto& [name, level] : kLevels) {
    if (lower == name) return level;
  }
  reject(where, value, "trace, debug, info, warning, error, off");
}

std::string parse_backend(const std::string& where, const std::string& value) {
  if (value != "auto" && value != "shm" && value != "mpi") reject(where, value, "auto, shm, mpi");
  return value;
}

std::string parse_gpu_backend(const std::string& where, const std::string& value) {
  if (value != "auto" && value != "nccl" && value != "staged") reject(where, value, "auto, nccl, staged");
  return value;
}

constexpr int64_t kMostBytes = 1LL << 40;

// One row per knob: the init() keyword, our variable, Horovod's name of the same knob ("" where it has none).
struct Knob {
  const char* keyword;
  const char* variable;
  const char* horovod;
  void (*assign)(Config&, const std::string& where, const std::string& value);
};

constexpr std::array<Knob, 14> kKnobs = {{
    {"fusion_threshold", "FUSEWIRE_FUSION_THRESHOLD", "HOROVOD_FUSION_THRESHOLD",
     [](Config& c, const std::string& w, const std::string& v) {
       c.fusion_threshold = parse_integer(w, v, 0, kMostBytes);
     }},
    {"cache_capacity", "FUSEWIRE_CACHE_CAPACITY", "HOROVOD_CACHE_CAPACITY",
     [](Config& c, const std::string& w, const std::string& v) { c.cache_capacity = parse_integer(w, v, 0, 1 << 24); }},
    {"stall_check_time", "FUSEWIRE_STALL_CHECK_TIME", "HOROVOD_STALL_CHECK_TIME_SECONDS",
     [](Config& c, const std::string& w, const std::string& v) { c.stall_check_seconds = parse_seconds(w, v); }},
    {"stall_abort_time", "FUSEWIRE_STALL_ABORT_TIME", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
     [](Config& c, const std::string& w, const std::string& v) { c.stall_abort_seconds = parse_seconds(w, v); }},
    {"timeline", "FUSEWIRE_TIMELINE", "HOROVOD_TIMELINE",
     [](Config& c, const std::string&, const std::string& v) { c.timeline = v == "DYNAMIC" ? "" : v; }},
    {"timeline_mark_cycles", "FUSEWIRE_TIMELINE_MARK_CYCLES", "HOROVOD_TIMELINE_MARK_CYCLES",
     [](Config& c, const std::string& w, const std::string& v) {
       c.timeline_mark_cycles = parse_integer(w, v, 0, 1) == 1;
     }},
    {"timeline_limit", "FUSEWIRE_TIMELINE_LIMIT", "",
     [](Config& c, const std::string& w, const std::string& v) {
       c.timeline_limit = parse_integer(w, v, 0, kMostBytes);
     }},
    {"spin_us", "FUSEWIRE_SPIN_US", "",
     [](Config& c, const std::string& w, const std::string& v) { c.spin_us = parse_integer(w, v, -1, 1'000'000); }},
    {"inline_limit", "FUSEWIRE_INLINE_LIMIT", "",
     [](Config& c, const std::string& w, const std::string& v) {
       c.inline_limit = parse_integer(w, v, 0, kMostBytes);
     }},
    {"shm_chunk", "FUSEWIRE_SHM_CHUNK", "",
     [](Config& c, const std::string& w, const std::string& v) { c.shm_chunk = parse_integer(w, v, 0, kMostBytes); }},
    {"backend", "FUSEWIRE_BACKEND", "",
     [](Config& c, const std::string& w, const std::string& v) { c.backend = parse_backend(w, v); }},
    {"gpu_backend", "FUSEWIRE_GPU_BACKEND", "",
     [](Config& c, const std::string& w, const std::string& v) { c.gpu_backend = parse_gpu_backend(w, v); }},
    {"mpi_module", "FUSEWIRE_MPI_MODULE", "",
     [](Config& c, const std::string&, const std::string& v) { c.mpi_module = v; }},
    {"log_level", "FUSEWIRE_LOG_LEVEL", "HOROVOD_LOG_LEVEL",
     [](Config& c, const std::string& w, const std::string& v) { c.log_level = parse_level(w, v); }},
}};

}  // namespace

Config Config::from_environment(const Lookup& get) {
  constexpr const char* kStallCheckDisable = "HOROVOD_STALL_CHECK_DISABLE";
  Config config;
  for (const Knob& knob : kKnobs) {
    if (const auto value = get(knob.variable)) {
      knob.assign(config, knob.variable, *value);
    } else if (const auto theirs = *knob.horovod == '\0' ? std::nullopt : get(knob.horovod)) {
      knob.assign(config, knob.horovod, *theirs);
    }
  }
  // Horovod's switch outdoes Horovod's time, but not ours.
  if (const auto disable = get(kStallCheckDisable)) {
    const bool off = parse_integer(kStallCheckDisable, *disable, 0, 1) == 1;
    if (off && !get("FUSEWIRE_STALL_CHECK_TIME")) config.stall_check_seconds = 0;
  }
  config.nccl_shares_gpus = get("NCCL_MULTI_RANK_GPU_ENABLE") == "1";
  return config;
}

Config Config::from_environment() {
  return from_environment([](const std::string& name) -> std::optional<std::string> {
    const char* value = std::getenv(name.c_str());
    if (value == nullptr) return std::nullopt;
    return std::string(value);
  });
}

void Config::set(const std::string& keyword, const std::string& value) {
  std::string names;
  for (const Knob& knob : kKnobs) {
    if (keyword == knob.keyword) {
      knob.assign(*this, keyword, value);
      return;
    }
    names += names.empty() ? "" : ", ";
    names += knob.keyword;
  }
  throw Error(ErrorCode::kInvalidArgument, "init() has no option '" + keyword + "'; allowed: " + names);
}

}  // namespace fusewire
