#include "engine/timeline_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include "common/error.h"

namespace fusewire {
namespace {

constexpr int64_t kPage = 4096;  // the smallest there is
constexpr int64_t kFirstBlanks = 64 << 10;
constexpr std::string_view kOpening = "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n";
constexpr std::string_view kClosing = "\n]}\n";
static_assert(TimelineFile::kLongestEvent + 2 <= kPage);

// Length of the UTF-8 sequence that `text` begins with; 0 when it is none.
size_t sequence_length(std::string_view text) {
  const auto byte = [&](size_t i) { return i < text.size() ? static_cast<unsigned char>(text[i]) : 0u; };
  const auto follows = [&](size_t i) { return (byte(i) & 0xc0) == 0x80; };
  const unsigned lead = byte(0);
  if (lead < 0x80) return 1;
  if (lead >= 0xc2 && lead < 0xe0) return follows(1) ? 2 : 0;
  if (lead >= 0xe0 && lead < 0xf0) {
    const bool overlong = lead == 0xe0 && byte(1) < 0xa0;
    const bool surrogate = lead == 0xed && byte(1) >= 0xa0;
    return follows(1) && follows(2) && !overlong && !surrogate ? 3 : 0;
  }
  if (lead >= 0xf0 && lead < 0xf5) {
    const bool overlong = lead == 0xf0 && byte(1) < 0x90;
    const bool too_large = lead == 0xf4 && byte(1) >= 0x90;
    return follows(1) && follows(2) && follows(3) && !overlong && !too_large ? 4 : 0;
  }
  return 0;
}

}  // namespace

std::string json_escaped(std::string_view text, size_t most) {
  const auto plain = [](unsigned char c) { return c >= 0x20 && c < 0x7f && c != '"' && c != '\\'; };
  if (text.size() <= most && std::all_of(text.begin(), text.end(), plain)) return std::string(text);
  std::string out;
  out.reserve(std::min(text.size(), most) + 8);
  while (!text.empty()) {
    if (out.size() >= most) return out + "...";
    const size_t length = sequence_length(text);
    const char c = text.front();
    if (length == 0) {
      out += "\\ufffd";
    } else if (length > 1) {
      out += text.substr(0, length);
    } else if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned char>(c));
      out += code;
    } else {
      out += c;
    }
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  return out;
}

TimelineFile::TimelineFile(std::string path, std::string_view first_event, int64_t limit_bytes)
    : path_(std::move(path)), limit_(limit_bytes) {
  pending_ = std::string(kOpening) + std::string(first_event);
  if (!rewrite(kFirstBlanks)) {
    throw Error(ErrorCode::kInvalidArgument,
                "the timeline cannot be written to '" + path_ + "': " + std::strerror(errno));
  }
}

TimelineFile::~TimelineFile() { finish(); }

bool TimelineFile::write_all(int descriptor, std::string_view bytes, int64_t at) {
  while (!bytes.empty()) {
    const ssize_t written = ::pwrite(descriptor, bytes.data(), bytes.size(), at);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return false;
    bytes.remove_prefix(static_cast<size_t>(written));
    at += written;
  }
  return true;
}

void TimelineFile::append(std::string_view event) {
  if (failed_ || event.size() > kLongestEvent) return;
  const int64_t room = kPage - bytes() % kPage;
  if (static_cast<int64_t>(event.size()) + 2 > room) pending_.append(static_cast<size_t>(room), ' ');
  pending_ += ",\n";
  pending_ += event;
}

bool TimelineFile::flush() {
  if (failed_ || pending_.empty()) return !failed_;
  if (bytes() > closing_) {
    failed_ = !rewrite(std::max(kFirstBlanks, bytes()));
  } else if (write_all(file_, pending_, at_)) {
    at_ = bytes();
    pending_.clear();
  } else {
    failed_ = true;
  }
  return !failed_;
}

// Moves everything to a new file with so many blanks after it.
bool TimelineFile::rewrite(int64_t blanks) {
  const std::string temporary = path_ + ".part";
  const int fresh = ::open(temporary.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fresh < 0) return false;
  bool good = true;
  std::string block(size_t{256} << 10, ' ');
  for (int64_t done = 0; good && done < at_;) {
    const ssize_t got =
        ::pread(file_, block.data(), std::min<size_t>(block.size(), static_cast<size_t>(at_ - done)), done);
    if (got < 0 && errno == EINTR) continue;
    good = got > 0 && write_all(fresh, {block.data(), static_cast<size_t>(got)}, done);
    done += got;
  }
  good = good && write_all(fresh, pending_, at_);
  const int64_t end = bytes();
  if (limit_ > 0) blanks = std::clamp<int64_t>(limit_ - end - static_cast<int64_t>(kClosing.size()), 0, blanks);
  const int64_t closing = end + blanks;
  std::fill(block.begin(), block.end(), ' ');
  for (int64_t done = end; good && done < closing; done += static_cast<int64_t>(block.size())) {
    good = write_all(fresh, {block.data(), std::min(block.size(), static_cast<size_t>(closing - done))}, done);
  }
  good = good && write_all(fresh, kClosing, closing) && std::rename(temporary.c_str(), path_.c_str()) == 0;
  if (!good) {
    const int reason = errno;
    ::unlink(temporary.c_str());
    ::close(fresh);
    errno = reason;
    return false;
  }
  if (file_ >= 0) ::close(file_);
  file_ = fresh;
  at_ = end;
  closing_ = closing;
  pending_.clear();
  return true;
}

void TimelineFile::finish() {
  if (file_ < 0) return;
  if (!failed_) rewrite(0);
  ::close(file_);
  file_ = -1;
}

void TimelineFile::abandon() noexcept {
  if (file_ >= 0) ::close(file_);
  file_ = -1;
}

}  // namespace fusewire
