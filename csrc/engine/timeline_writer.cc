#include "engine/timeline_writer.h"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <utility>

#include "common/types.h"
#include "control/message.h"

namespace fusewire {
namespace {

constexpr int kCyclesThread = 1;
constexpr int kGpuThread = 2;
constexpr int kFirstBucketThread = 100;
constexpr int kFirstTensorThread = 1000;
constexpr size_t kNameBytes = 300;      // of a tensor's name, escaped
constexpr size_t kContentBytes = 2600;  // of a bucket's list of names, escaped
// The longest event and the last words, each with the blanks that keep it inside one page of the file.
constexpr int64_t kRoomForLastWords = 3 * 4096;
constexpr std::array<std::string_view, kChunkStepCount> kSteps = {"pack", "wait", "reduce", "unpack"};

template <typename... Arguments>
std::string formatted(const char* format, Arguments... arguments) {
  char text[256];
  const int length = std::snprintf(text, sizeof text, format, arguments...);
  return {text, static_cast<size_t>(std::clamp(length, 0, static_cast<int>(sizeof text) - 1))};
}

void append_quoted(std::string& out, std::string_view text) {
  out += '"';
  out += json_escaped(text, kNameBytes);
  out += '"';
}

std::string quoted(std::string_view text) {
  std::string result;
  append_quoted(result, text);
  return result;
}

void append_number(std::string& out, int64_t number) {
  char digits[24];
  out.append(digits, std::to_chars(digits, digits + sizeof digits, number).ptr);
}

// The inside of a JSON object, member by member. Written by hand because this is most of what a timeline costs: several
// events per tensor, and snprintf takes longer than all the rest of an event.
void add_key(std::string& out, std::string_view key) {
  if (!out.empty()) out += ',';
  out += '"';
  out += key;
  out += "\":";
}

void add(std::string& out, std::string_view key, int64_t number) {
  add_key(out, key);
  append_number(out, number);
}

void add(std::string& out, std::string_view key, std::string_view text) {
  add_key(out, key);
  append_quoted(out, text);
}

void append_microseconds(std::string& out, int64_t nanoseconds) {
  append_number(out, nanoseconds / 1000);
  const auto rest = static_cast<int>(nanoseconds % 1000);
  out += {'.', static_cast<char>('0' + rest / 100), static_cast<char>('0' + rest / 10 % 10),
          static_cast<char>('0' + rest % 10)};
}

void add_totals(std::string& out, const std::array<double, kChunkStepCount>& totals) {
  constexpr std::array<std::string_view, kChunkStepCount> kKeys = {"pack_us", "wait_us", "reduce_us", "unpack_us"};
  for (size_t step = 0; step < kKeys.size(); ++step) {
    const auto tenths = static_cast<int64_t>(totals[step] / 100 + 0.5);
    add(out, kKeys[step], tenths / 10);
    out += {'.', static_cast<char>('0' + tenths % 10)};
  }
}

void add_operation(std::string& out, const TraceRecord& record) {
  const auto kind = static_cast<OpKind>(record.what);
  add(out, "process_set", record.set);
  if (reduces(kind)) add(out, "op", to_string(static_cast<ReduceOp>(record.op)));
  if (!moves_data(kind)) return;
  add(out, "dtype", to_string(static_cast<DataType>(record.dtype)));
  if (record.wire != record.dtype) add(out, "wire", to_string(static_cast<DataType>(record.wire)));
}

// Units of the same name in different process sets are different tensors.
std::string full_name(std::string_view name, uint32_t set) {
  std::string result(name);
  return set == 0 ? result : result + " [process set " + std::to_string(set) + "]";
}

// Names that never come back share a lane: "allreduce.noname.17" is on "allreduce.noname".
std::string lane_name(const std::string& name) {
  const size_t mark = name.find(kUnnamedMark);
  return mark == std::string::npos ? name : name.substr(0, mark + kUnnamedMark.size() - 1);
}

}  // namespace

TimelineWriter::TimelineWriter(const std::string& path, int rank, const std::string& process, int64_t limit_bytes)
    : rank_(rank),
      limit_(limit_bytes),
      file_(path,
            formatted("{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":%d,\"args\":{\"name\":", rank) +
                quoted(process) + "}}",
            limit_bytes),
      next_thread_(kFirstTensorThread) {
  put(formatted("{\"ph\":\"M\",\"name\":\"process_sort_index\",\"pid\":%d,\"args\":{\"sort_index\":%d}}", rank, rank));
  name_thread(kCyclesThread, "cycles", 0);
  bucket_thread(0);
  file_.flush();
}

void TimelineWriter::write(const TraceRecord& record, std::string_view text) {
  if (stopped_) return;
  last_ = std::max({last_, record.begin, record.end});
  switch (record.kind) {
    case TraceKind::kSubmit:
      return submit(record, text);
    case TraceKind::kAnnounce:
      return announce(record, text);
    case TraceKind::kAnswer:
      return answer(record);
    case TraceKind::kEnd:
      return end(record, text);
    case TraceKind::kBucket:
      return begin_bucket(record);
    case TraceKind::kMember:
      return add_member(record);
    case TraceKind::kChunk:
      return chunk(record);
    case TraceKind::kRan:
      return end_bucket(record.end, text);
    case TraceKind::kDevice:
      return on_gpu(record);
    case TraceKind::kCycle:
      return event('i', kCyclesThread, "cycle", record.begin, -1, {});
  }
}

void TimelineWriter::lost(uint64_t records) {
  event('i', kCyclesThread, "records lost: events came faster than they could be written", last_, -1,
        formatted("\"records\":%llu", static_cast<unsigned long long>(records)));
}

bool TimelineWriter::flush() { return file_.flush() && !stopped_; }

// ---------------------------------------------------------------------------------------------------------------------

void TimelineWriter::submit(const TraceRecord& record, std::string_view text) {
  const auto kind = static_cast<OpKind>(record.what);
  std::string name = full_name(text, record.set);
  Lane& lane = lane_for(name);
  lane.busy = true;
  std::string& arguments = fresh_arguments();
  add(arguments, "tensor", text);
  add(arguments, "kind", to_string(kind));
  add_operation(arguments, record);
  add(arguments, "bytes", record.a);
  add(arguments, "tensors", record.b);
  event('B', lane.thread, "negotiate", record.begin, -1, arguments);
  by_name_[name] = record.unit;
  units_[record.unit] = {&lane, std::move(name), to_string(kind), 0, true};
}

// As seen by the root, on the lane of its own unit where it has one in negotiation.
void TimelineWriter::announce(const TraceRecord& record, std::string_view text) {
  const std::string name = full_name(text, record.set);
  const auto known = by_name_.find(name);
  const auto unit = known == by_name_.end() ? units_.end() : units_.find(known->second);
  const Lane& lane = unit == units_.end() ? lane_for(name) : *unit->second.lane;
  std::string& arguments = fresh_arguments();
  add(arguments, "tensor", text);
  add(arguments, "rank", record.a);
  std::string mark = "rank ";
  append_number(mark, record.a);
  event('i', lane.thread, mark += " is ready", record.begin, -1, arguments);
}

void TimelineWriter::answer(const TraceRecord& record) {
  const auto found = units_.find(record.unit);
  if (found == units_.end() || !found->second.negotiating) return;
  Unit& unit = found->second;
  event('E', unit.lane->thread, "negotiate", record.begin, -1, {});
  unit.answered = record.begin;
  unit.negotiating = false;
  const auto named = by_name_.find(unit.name);
  if (named != by_name_.end() && named->second == record.unit) by_name_.erase(named);
}

void TimelineWriter::end(const TraceRecord& record, std::string_view failure) {
  answer(record);
  const auto found = units_.find(record.unit);
  if (found == units_.end()) return;
  if (!failure.empty()) {
    std::string& arguments = fresh_arguments();
    add(arguments, "error", failure);
    event('i', found->second.lane->thread, "failed", record.begin, -1, arguments);
  }
  release(record.unit);
}

void TimelineWriter::release(uint64_t number) {
  const auto found = units_.find(number);
  if (found == units_.end()) return;
  found->second.lane->busy = false;
  units_.erase(found);
}

// ---------------------------------------------------------------------------------------------------------------------

void TimelineWriter::begin_bucket(const TraceRecord& record) {
  if (bucket_.open) end_bucket(record.begin, "its end was not recorded");
  bucket_.record = record;
  bucket_.thread = bucket_thread(record.set);
  bucket_.members.clear();
  bucket_.announced = bucket_.first = 0;
  bucket_.totals = {};
  if (record.count == 0) open_bucket();  // a rank that has joined submitted none of it
}

void TimelineWriter::add_member(const TraceRecord& record) {
  ++bucket_.announced;
  if (const auto found = units_.find(record.unit); found != units_.end()) {
    bucket_.members.push_back({&found->second, record.unit, record.a, record.b, 0, {}});
  }
  if (bucket_.announced == bucket_.record.count) open_bucket();
}

void TimelineWriter::open_bucket() {
  const TraceRecord& record = bucket_.record;
  bucket_.open = true;
  std::string& arguments = fresh_arguments();
  add(arguments, "bucket", record.a);
  const std::string number = arguments;
  add_operation(arguments, record);
  add(arguments, "bytes", record.b);
  add(arguments, "units", record.count);
  add_key(arguments, "tensors");
  arguments += '[';
  size_t shown = 0;
  const size_t most = arguments.size() + kContentBytes;
  for (const Member& member : bucket_.members) {
    if (arguments.size() > most) break;
    if (shown++ > 0) arguments += ',';
    append_quoted(arguments, member.unit->name);
  }
  arguments += ']';
  if (shown < record.count) add(arguments, "and_more", static_cast<int64_t>(record.count - shown));
  event('B', bucket_.thread, to_string(static_cast<OpKind>(record.what)), record.begin, -1, arguments);
  for (const Member& member : bucket_.members) {
    const Unit& unit = *member.unit;
    event('X', unit.lane->thread, "queue", unit.answered, record.begin, {});
    event('B', unit.lane->thread, unit.kind, record.begin, -1, number);
  }
}

void TimelineWriter::chunk(const TraceRecord& record) {
  if (!bucket_.open) return;
  const std::string_view name = kSteps[record.step];
  const auto duration = static_cast<double>(record.end - record.begin);
  bucket_.totals[record.step] += duration;
  std::string& arguments = fresh_arguments();
  add(arguments, "first", record.a);
  add(arguments, "elements", record.b - record.a);
  event('X', bucket_.thread, name, record.begin, record.end, arguments);
  // A pipeline works on a few chunks at a time, in ascending order; a step's time is shared out by elements.
  auto& members = bucket_.members;
  while (bucket_.first < members.size() && record.step == static_cast<uint8_t>(ChunkStep::kUnpack) &&
         members[bucket_.first].to <= record.a) {
    ++bucket_.first;
  }
  for (size_t i = bucket_.first; i < members.size() && members[i].from < record.b; ++i) {
    Member& member = members[i];
    const int64_t common = std::min(member.to, record.b) - std::max(member.from, record.a);
    if (common <= 0) continue;
    member.totals[record.step] += duration * static_cast<double>(common) / static_cast<double>(record.b - record.a);
    if (++member.chunks > kMostChunksShown) continue;
    add(fresh_arguments(), "elements", common);
    event('X', member.unit->lane->thread, name, record.begin, record.end, arguments);
  }
}

void TimelineWriter::end_bucket(int64_t at, std::string_view failure) {
  if (!bucket_.open) return;
  bucket_.open = false;
  for (const Member& member : bucket_.members) {
    std::string& arguments = fresh_arguments();
    add_totals(arguments, member.totals);
    event('E', member.unit->lane->thread, member.unit->kind, at, -1, arguments);
    release(member.number);
  }
  std::string& arguments = fresh_arguments();
  add_totals(arguments, bucket_.totals);
  if (!failure.empty()) add(arguments, "error", failure);
  event('E', bucket_.thread, to_string(static_cast<OpKind>(bucket_.record.what)), at, -1, arguments);
}

void TimelineWriter::on_gpu(const TraceRecord& record) {
  if (!std::exchange(gpu_named_, true)) name_thread(kGpuThread, "GPU", kGpuThread);
  std::string& arguments = fresh_arguments();
  add(arguments, "bucket", record.a);
  add(arguments, "process_set", record.set);
  event('X', kGpuThread, to_string(static_cast<OpKind>(record.what)), record.begin, record.end, arguments);
}

// ---------------------------------------------------------------------------------------------------------------------

TimelineWriter::Lane& TimelineWriter::lane_for(const std::string& name) {
  std::string key = lane_name(name);
  auto found = lanes_.find(key);
  if (found == lanes_.end() && lane_count_ >= kMostLanes) {
    key = "other tensors";
    found = lanes_.find(key);
  }
  if (found == lanes_.end()) found = lanes_.try_emplace(key).first;
  std::deque<Lane>& lanes = found->second;
  for (Lane& lane : lanes) {
    if (!lane.busy) return lane;
  }
  lanes.push_back({next_thread_++, false});
  ++lane_count_;
  const std::string suffix = lanes.size() == 1 ? "" : " (" + std::to_string(lanes.size()) + ")";
  name_thread(lanes.back().thread, key.substr(0, TraceRing::kLongestText) + suffix, lanes.back().thread);
  return lanes.back();
}

int TimelineWriter::bucket_thread(uint32_t set) {
  const auto [found, fresh] = bucket_threads_.try_emplace(set, kFirstBucketThread + static_cast<int>(set));
  if (fresh) {
    name_thread(found->second, set == 0 ? "buckets" : "buckets of process set " + std::to_string(set), found->second);
  }
  return found->second;
}

void TimelineWriter::name_thread(int thread, std::string_view name, int order) {
  put(formatted("{\"ph\":\"M\",\"name\":\"thread_name\",\"pid\":%d,\"tid\":%d,\"args\":{\"name\":", rank_, thread) +
      quoted(name) + "}}");
  put(formatted("{\"ph\":\"M\",\"name\":\"thread_sort_index\",\"pid\":%d,\"tid\":%d,\"args\":{\"sort_index\":%d}}",
                rank_, thread, order));
}

void TimelineWriter::event(char phase, int thread, std::string_view name, int64_t begin, int64_t end,
                           std::string_view arguments) {
  buffer_ = "{\"ph\":\"";
  buffer_ += phase;
  buffer_ += "\",\"pid\":";
  append_number(buffer_, rank_);
  buffer_ += ",\"tid\":";
  append_number(buffer_, thread);
  buffer_ += ",\"ts\":";
  append_microseconds(buffer_, begin);
  if (phase == 'X') {
    buffer_ += ",\"dur\":";
    append_microseconds(buffer_, std::max<int64_t>(end - begin, 0));
  }
  if (phase == 'i') buffer_ += ",\"s\":\"t\"";
  buffer_ += ",\"name\":\"";
  buffer_ += name;
  buffer_ += '"';
  if (!arguments.empty()) {
    buffer_ += ",\"args\":{";
    buffer_ += arguments;
    buffer_ += '}';
  }
  buffer_ += '}';
  put(buffer_);
}

void TimelineWriter::put(std::string_view event) {
  if (stopped_) return;
  file_.append(event);
  if (limit_ == 0 || file_.bytes() + kRoomForLastWords < limit_) return;
  stopped_ = true;
  std::string last = formatted("{\"ph\":\"i\",\"s\":\"g\",\"pid\":%d,\"tid\":%d,\"ts\":", rank_, kCyclesThread);
  append_microseconds(last, last_);
  file_.append(last +
               ",\"name\":\"recording stopped: the file has reached its largest size "
               "(FUSEWIRE_TIMELINE_LIMIT)\"}");
}

}  // namespace fusewire
