#include "common/config.h"

#include <array>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <string_view>
#include <utility>

#include "common/error.h"

namespace fusewire {
namespace {

[[noreturn]] void reject(const std::string& where, const std::string& value, const std::string& allowed) {
  throw Error(ErrorCode::kInvalidArgument, where + "=" + value + " is not valid; allowed: " + allowed);
}

int64_t parse_integer(const std::string& where, const std::string& value, int64_t least) {
  errno = 0;
  char* end = nullptr;
  const long long number = std::strtoll(value.c_str(), &end, 10);
  if (value.empty() || *end != '\0' || errno != 0 || number < least) {
    reject(where, value, "a whole number >= " + std::to_string(least));
  }
  return number;
}

double parse_seconds(const std::string& where, const std::string& value) {
  errno = 0;
  char* end = nullptr;
  const double number = std::strtod(value.c_str(), &end);
  if (value.empty() || *end != '\0' || errno != 0 || !std::isfinite(number) || number < 0) {
    reject(where, value, "seconds >= 0 (0 turns it off)");
  }
  return number;
}

LogLevel parse_level(const std::string& where, const std::string& value) {
  static constexpr std::array<std::pair<std::string_view, LogLevel>, 6> kLevels = {{
      {"trace", LogLevel::kTrace},
      {"debug", LogLevel::kDebug},
      {"info", LogLevel::kInfo},
      {"warning", LogLevel::kWarning},
      {"error", LogLevel::kError},
      {"off", LogLevel::kOff},
  }};
  for (const auto& [name, level] : kLevels) {
    if (value == name) return level;
  }
  reject(where, value, "trace, debug, info, warning, error, off");
}

std::string parse_backend(const std::string& where, const std::string& value) {
  if (value != "auto" && value != "shm") reject(where, value, "auto, shm");
  return value;
}

// One row per knob: the init() keyword, our variable, Horovod's name of the same knob ("" where it has none).
struct Knob {
  const char* keyword;
  const char* variable;
  const char* horovod;
  void (*assign)(Config&, const std::string& where, const std::string& value);
};

constexpr std::array<Knob, 9> kKnobs = {{
    {"fusion_threshold", "FUSEWIRE_FUSION_THRESHOLD", "HOROVOD_FUSION_THRESHOLD",
     [](Config& c, const std::string& w, const std::string& v) { c.fusion_threshold = parse_integer(w, v, 0); }},
    {"cache_capacity", "FUSEWIRE_CACHE_CAPACITY", "HOROVOD_CACHE_CAPACITY",
     [](Config& c, const std::string& w, const std::string& v) { c.cache_capacity = parse_integer(w, v, 0); }},
    {"stall_check_time", "FUSEWIRE_STALL_CHECK_TIME", "HOROVOD_STALL_CHECK_TIME_SECONDS",
     [](Config& c, const std::string& w, const std::string& v) { c.stall_check_seconds = parse_seconds(w, v); }},
    {"stall_abort_time", "FUSEWIRE_STALL_ABORT_TIME", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
     [](Config& c, const std::string& w, const std::string& v) { c.stall_abort_seconds = parse_seconds(w, v); }},
    {"spin_us", "FUSEWIRE_SPIN_US", "",
     [](Config& c, const std::string& w, const std::string& v) { c.spin_us = parse_integer(w, v, -1); }},
    {"inline_limit", "FUSEWIRE_INLINE_LIMIT", "",
     [](Config& c, const std::string& w, const std::string& v) { c.inline_limit = parse_integer(w, v, 0); }},
    {"shm_chunk", "FUSEWIRE_SHM_CHUNK", "",
     [](Config& c, const std::string& w, const std::string& v) { c.shm_chunk = parse_integer(w, v, 0); }},
    {"backend", "FUSEWIRE_BACKEND", "",
     [](Config& c, const std::string& w, const std::string& v) { c.backend = parse_backend(w, v); }},
    {"log_level", "FUSEWIRE_LOG_LEVEL", "HOROVOD_LOG_LEVEL",
     [](Config& c, const std::string& w, const std::string& v) { c.log_level = parse_level(w, v); }},
}};

}  // namespace

Config Config::from_environment(const Lookup& get) {
  Config config;
  if (get("HOROVOD_STALL_CHECK_DISABLE").value_or("0") == "1") config.stall_check_seconds = 0;
  for (const Knob& knob : kKnobs) {
    for (const char* name : {knob.variable, knob.horovod}) {
      if (*name == '\0') continue;
      if (const auto value = get(name)) {
        knob.assign(config, name, *value);
        break;
      }
    }
  }
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
