#include "torch/profile.h"

#include <ATen/record_function.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <memory>
#include <string>
#include <utility>

namespace fusewire {
namespace {

using Session = torch::profiler::impl::ProfilerStateBase;

Session* current_session() {
  return static_cast<Session*>(c10::ThreadLocalDebugInfo::get(c10::DebugInfoKind::PROFILER_STATE));
}

// Whether the profiler still records. Torch has no public way to ask from another thread: a session that has been
// stopped has no callback any more.
struct Peek : Session {
  static bool active(const Session& session) { return session.*(&Peek::handle_) != 0; }
};

// What the profiler keeps per thread, put in place for a moment on a thread of the engine's.
class Borrowed {
 public:
  Borrowed(std::shared_ptr<c10::ThreadLocalDebugInfo> info, const at::RecordFunctionTLS& callbacks)
      : info_(c10::ThreadLocalDebugInfo::current()), callbacks_(at::get_record_function_tls_()) {
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(info));
    at::set_record_function_tls_(callbacks);
  }
  ~Borrowed() {
    c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(info_));
    at::set_record_function_tls_(callbacks_);
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

 private:
  std::shared_ptr<c10::ThreadLocalDebugInfo> info_;
  at::RecordFunctionTLS callbacks_;
};

using Range = std::unique_ptr<at::RecordFunction>;

Range begin_range(const std::string& name) {
  auto range = std::make_unique<at::RecordFunction>(at::RecordScope::USER_SCOPE);
  if (!range->isActive()) return nullptr;
  range->_setAsync();
  range->before(name);
  return range;
}

class ProfiledUnit final : public UnitObserver {
 public:
  ProfiledUnit(OpKind kind, std::shared_ptr<void> kept)
      : kept_(std::move(kept)),
        info_(c10::ThreadLocalDebugInfo::current()),
        callbacks_(at::get_record_function_tls_()),
        session_(current_session()),
        whole_(begin_range("fusewire::" + std::string(to_string(kind)))),
        phase_(begin_range("fusewire::negotiate")) {}
  ~ProfiledUnit() {
    abandon(whole_);
    abandon(phase_);
  }

  void answered() override { next("fusewire::queue"); }
  void run_begins() override { next("fusewire::run"); }
  void ended() override {
    if (!Peek::active(*session_)) return;
    const Borrowed borrowed(info_, callbacks_);
    phase_.reset();
    whole_.reset();
  }

 private:
  void next(const char* phase) {
    if (!Peek::active(*session_)) return;
    const Borrowed borrowed(info_, callbacks_);
    phase_.reset();
    phase_ = begin_range(phase);
  }

  // A range that is destroyed ends, which touches the session's events.
  static void abandon(Range& range) { static_cast<void>(range.release()); }

  const std::shared_ptr<void> kept_;
  const std::shared_ptr<c10::ThreadLocalDebugInfo> info_;  // owns the session
  const at::RecordFunctionTLS callbacks_;
  Session* const session_;
  Range whole_;
  Range phase_;
};

}  // namespace

void profile(Submission& submission) {
  if (current_session() == nullptr) [[likely]]
    return;
  auto unit = std::make_shared<ProfiledUnit>(submission.kind, std::move(submission.keep_alive));
  submission.observer = unit.get();
  submission.keep_alive = std::move(unit);
}

}  // namespace fusewire
