#include "engine/activity.h"

#include <exception>
#include <system_error>
#include <utility>

#include "common/thread.h"

namespace fusewire {

void ActivityProbe::set_source(Source source) {
  const std::lock_guard lock(mutex_);
  source_ = std::move(source);
}

void ActivityProbe::ask() {
  {
    const std::lock_guard lock(mutex_);
    if (!source_ || stopping_) return;
    asked_ = true;
    if (!thread_.joinable()) {
      try {
        thread_ = start_thread("fw-stack", [this] { thread_main(); });
      } catch (const std::system_error&) {
        return;  // no thread, no answer: the report says that there was none
      }
    }
  }
  wake_.notify_one();
}

void ActivityProbe::thread_main() {
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [this] { return stopping_ || asked_; });
    if (stopping_) return;
    asked_ = false;
    const Source source = source_;
    lock.unlock();
    std::string text;
    try {
      text = source();
    } catch (const std::exception& error) {
      text = std::string("it could not be found out: ") + error.what();
    }
    tell_(std::move(text));
    lock.lock();
  }
}

void ActivityProbe::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  if (thread_.joinable()) thread_.join();
}

}  // namespace fusewire
