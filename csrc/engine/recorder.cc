#include "engine/recorder.h"

#include <algorithm>

#include "engine/executor.h"

namespace fusewire {

uint64_t Recorder::record_submission(const UnitSpec& spec) {
  TraceRecord record;
  record.kind = TraceKind::kSubmit;
  record.what = static_cast<uint8_t>(spec.kind);
  record.op = static_cast<uint8_t>(spec.op);
  record.set = negotiated_in(spec);
  record.begin = Timeline::now();
  record.unit = timeline_.next_unit();
  record.b = static_cast<int64_t>(spec.tensors.size());
  if (!spec.tensors.empty()) {
    record.dtype = static_cast<uint8_t>(spec.tensors.front().dtype);
    record.wire = static_cast<uint8_t>(spec.tensors.front().wire);
  }
  for (const TensorSpec& tensor : spec.tensors) {
    record.a += std::max<int64_t>(numel(tensor.shape), 0) * static_cast<int64_t>(size_of(tensor.wire));
  }
  timeline_.record(record, spec.name);
  return record.unit;
}

void Recorder::answered(const UnitTrace& unit, Clock::time_point since, Clock::time_point now) {
  counters_.answered(static_cast<uint64_t>(std::max<int64_t>((now - since).count(), 0)));
  if (unit.observer != nullptr) [[unlikely]]
    unit.observer->answered();
  if (unit.number == 0 || !timeline_.on()) return;
  TraceRecord record;
  record.kind = TraceKind::kAnswer;
  record.begin = Timeline::now();
  record.unit = unit.number;
  timeline_.record(record);
}

void Recorder::ended(const UnitTrace& unit, OpKind kind, const Error* failure, bool skipped) {
  failure == nullptr ? counters_.ended(kind, skipped) : counters_.failed(1);
  end(unit, failure);
}

void Recorder::dropped(const UnitTrace& unit, const Error& failure) {
  counters_.failed(1);
  end(unit, &failure);
}

void Recorder::end(const UnitTrace& unit, const Error* failure) {
  if (unit.observer != nullptr) [[unlikely]]
    unit.observer->ended();
  if (unit.number == 0 || !timeline_.on()) return;
  TraceRecord record;
  record.kind = TraceKind::kEnd;
  record.begin = Timeline::now();
  record.unit = unit.number;
  timeline_.record(record, failure == nullptr ? std::string_view() : std::string_view(failure->what()));
}

void Recorder::record_announcement(int rank, uint32_t process_set, std::string_view name) {
  TraceRecord record;
  record.kind = TraceKind::kAnnounce;
  record.set = process_set;
  record.begin = Timeline::now();
  record.a = rank;
  timeline_.record(record, name);
}

void Recorder::record_cycle(Clock::time_point now) {
  TraceRecord record;
  record.kind = TraceKind::kCycle;
  record.begin = Timeline::nanoseconds(now);
  timeline_.record(record);
}

// ---------------------------------------------------------------------------------------------------------------------

void Recorder::run_begins(Assignment& assignment) {
  for (const FinishedUnit& unit : assignment.units) {
    if (unit.trace.observer != nullptr) [[unlikely]]
      unit.trace.observer->run_begins();
  }
  if (timeline_.on()) record_bucket(assignment);
  began_ = ticks();
}

void Recorder::record_bucket(Assignment& assignment) {
  if (assignment.parts.empty()) return;
  const Bucket& first = assignment.parts.front();
  TraceRecord record;
  record.kind = TraceKind::kBucket;
  record.what = static_cast<uint8_t>(first.kind);
  record.op = static_cast<uint8_t>(first.op);
  record.dtype = static_cast<uint8_t>(first.dtype);
  record.wire = static_cast<uint8_t>(first.wire);
  record.set = assignment.process_set;
  record.count = static_cast<uint32_t>(assignment.units.size());
  record.begin = Timeline::now();
  record.a = static_cast<int64_t>(assignment.bucket);
  record.b = assignment.bytes;
  timeline_.record(record);
  record.kind = TraceKind::kMember;
  int64_t at = 0;
  for (const FinishedUnit& unit : assignment.units) {
    record.unit = unit.trace.number;
    record.a = at;
    record.b = at += unit.elements;
    timeline_.record(record);
  }
  for (Bucket& part : assignment.parts) part.trace = &chunks_;
}

void Recorder::run_ends(Assignment& assignment, const Error* failure, bool by_executor) {
  const uint64_t duration = ticks() - began_;
  if (assignment.parts.empty()) {  // nobody had anything
    for (const FinishedUnit& unit : assignment.units) end(unit.trace, failure);
    counters_.skipped(assignment.units.size());
    return;
  }
  const size_t done = failure == nullptr ? assignment.units.size() : 0;
  counters_.ran(assignment.parts.front().kind, done, assignment.bytes, duration, by_executor);
  if (assignment.uses_gpu()) counters_.ran_on_gpu();
  if (failure != nullptr) counters_.failed(assignment.units.size());
  for (FinishedUnit& unit : assignment.units) {
    if (unit.trace.observer != nullptr) [[unlikely]]
      unit.trace.observer->ended();
    unit.trace.observer = nullptr;  // once
  }
  if (!timeline_.on()) return;
  TraceRecord record;
  record.kind = TraceKind::kRan;
  record.end = Timeline::now();
  timeline_.record(record, failure == nullptr ? std::string_view() : std::string_view(failure->what()));
}

void Recorder::device_ended(const DeviceWork& work, std::optional<std::chrono::nanoseconds> took) {
  if (!took || !timeline_.on()) return;
  TraceRecord record;
  record.kind = TraceKind::kDevice;
  record.what = static_cast<uint8_t>(work.kind);
  record.set = work.process_set;
  record.a = static_cast<int64_t>(work.bucket);
  record.end = Timeline::now();
  record.begin = record.end - took->count();
  timeline_.record(record);
}

void Recorder::Chunks::chunk(ChunkStep step, Clock::time_point begin, Clock::time_point end, int64_t from, int64_t to) {
  if (!timeline_.on()) return;
  TraceRecord record;
  record.kind = TraceKind::kChunk;
  record.step = static_cast<uint8_t>(step);
  record.begin = Timeline::nanoseconds(begin);
  record.end = Timeline::nanoseconds(end);
  record.a = from;
  record.b = to;
  timeline_.record(record);
}

}  // namespace fusewire
