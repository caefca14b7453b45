// Answers the root's question what this rank does: see Note [Probes] in control/stall_inspector.h.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace fusewire {

// Finding out may take a while (a language's lock has to be had, or given up on), so a thread of its own does it
// ("fw-stack"), which is started by the first question. Lock order: mutex_ is a leaf; nothing is called while it is
// held.
class ActivityProbe {
 public:
  // Says what this process does, in words or stacks, within half a second. Called on any thread.
  using Source = std::function<std::string()>;

  // `tell` takes the answer, on the probe's thread.
  explicit ActivityProbe(std::function<void(std::string)> tell) : tell_(std::move(tell)) {}
  ~ActivityProbe() { stop(); }
  ActivityProbe(const ActivityProbe&) = delete;
  ActivityProbe& operator=(const ActivityProbe&) = delete;

  void set_source(Source source);  // none: nothing is answered
  void ask();                      // never blocks
  void stop();                     // joins the thread; idempotent

 private:
  void thread_main();

  const std::function<void(std::string)> tell_;
  std::mutex mutex_;
  std::condition_variable wake_;
  Source source_;
  bool asked_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace fusewire
