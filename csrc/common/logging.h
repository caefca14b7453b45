// One line per message on stderr, "[fusewire rank 1] warning: ...", written with a single write(2) so that ranks do not
// interleave. A sink can replace stderr (tests, Python's logging).
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "common/config.h"

namespace fusewire {

class Logger {
 public:
  using Sink = std::function<void(LogLevel, std::string_view line)>;

  explicit Logger(LogLevel level = LogLevel::kWarning, int rank = -1, Sink sink = {})
      : level_(level), rank_(rank), sink_(std::move(sink)) {}

  bool enabled(LogLevel level) const { return level >= level_ && level_ != LogLevel::kOff; }
  void log(LogLevel level, const std::string& message) const;
  void warning(const std::string& message) const { log(LogLevel::kWarning, message); }
  void info(const std::string& message) const { log(LogLevel::kInfo, message); }
  void debug(const std::string& message) const { log(LogLevel::kDebug, message); }

 private:
  LogLevel level_;
  int rank_;
  Sink sink_;
};

}  // namespace fusewire
