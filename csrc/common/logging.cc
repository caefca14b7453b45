#include "common/logging.h"

#include <unistd.h>

namespace fusewire {
namespace {

std::string_view level_name(LogLevel level) {
  switch (level) {
    case LogLevel::kTrace:
      return "trace";
    case LogLevel::kDebug:
      return "debug";
    case LogLevel::kInfo:
      return "info";
    case LogLevel::kWarning:
      return "warning";
    case LogLevel::kError:
      return "error";
    case LogLevel::kOff:
      break;
  }
  return "off";
}

}  // namespace

void Logger::log(LogLevel level, const std::string& message) const {
  if (!enabled(level)) return;
  std::string line = "[fusewire";
  if (rank_ >= 0) line += " rank " + std::to_string(rank_);
  line += "] ";
  line += level_name(level);
  line += ": " + message + "\n";
  if (sink_) {
    sink_(level, line);
    return;
  }
  // A log line that cannot be written is not worth failing an operation for.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

}  // namespace fusewire
