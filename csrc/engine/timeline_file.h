// A JSON file of trace events that is valid at every moment, so also when the process is killed while it writes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace fusewire {

// `text` as the inside of a JSON string, at most about `most` bytes of it: quotes, control characters and what is not
// UTF-8 are escaped or replaced.
std::string json_escaped(std::string_view text, size_t most = SIZE_MAX);

// Note [Valid at every moment]
// The file is  {"displayTimeUnit":"ns","traceEvents":[ events, blanks ]}  with enough blanks for many more events: the
// closing brackets are ahead of what is written, and new events replace blanks. What a SIGKILL can cut is a write(),
// but only between two pages, never inside one; so no event crosses the border of a page, and whatever is cut away was
// blank before. When the blanks are used up, the events move to a new file, which is given twice the room and then
// takes the old one's name. The same, without blanks, is how a file ends.
class TimelineFile {
 public:
  // Makes the file (or replaces one) with this first event. Throws Error(kInvalidArgument) when that cannot be done.
  // Events count as they come, but no blanks go beyond `limit_bytes` (0: there is no limit).
  TimelineFile(std::string path, std::string_view first_event, int64_t limit_bytes = 0);
  ~TimelineFile();  // as finish()
  TimelineFile(const TimelineFile&) = delete;
  TimelineFile& operator=(const TimelineFile&) = delete;

  static constexpr size_t kLongestEvent = 4000;

  // `event`: one JSON object. It is in the file after the next flush(). A longer one than kLongestEvent is left out.
  void append(std::string_view event);
  bool flush();   // false: it could not be written, and nothing will be from now on
  void finish();  // flushes and takes the blanks away; the last call

  int64_t bytes() const { return at_ + static_cast<int64_t>(pending_.size()); }
  const std::string& path() const { return path_; }

  // In a forked child: the file belongs to the parent.
  void abandon() noexcept;

 private:
  bool rewrite(int64_t blanks);
  bool write_all(int descriptor, std::string_view bytes, int64_t at);

  const std::string path_;
  const int64_t limit_;
  int file_ = -1;
  int64_t at_ = 0;       // where pending_ goes
  int64_t closing_ = 0;  // where the closing brackets are
  std::string pending_;
  bool failed_ = false;
};

}  // namespace fusewire
