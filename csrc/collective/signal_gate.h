// Signals that come while a data plane waits for peers.
#pragma once

#include <chrono>
#include <functional>
#include <optional>

namespace fusewire {

// Note [Signals in a wait]
// A caller that runs a bucket itself (Ctrl-C is pressed in its thread, so to speak) may have to wait inside of the data
// plane for a peer that has stopped. A signal cuts the sleep short; when the bucket still waits kSignalGrace later,
// the thread's handlers are given the word (Bucket::on_signal). If that returns, the wait goes on as if nothing had
// happened. If it throws, this rank gives up the bucket, and with it the data plane on all ranks, as after any failure
// of its own. The grace lets a bucket that is getting on come to its end, so that Ctrl-C costs no more than it has to.
// A signal that comes while the plane copies or reduces is seen by nobody until the bucket has ended, or the next one
// comes.
inline constexpr std::chrono::milliseconds kSignalGrace{500};

class SignalGate {
 public:
  using Clock = std::chrono::steady_clock;

  // For the bucket that begins; null: nobody cares.
  void begin(const std::function<void()>* ask) {
    ask_ = ask;
    at_.reset();
  }

  void signalled() {
    if (ask_ != nullptr && !at_) at_ = Clock::now() + kSignalGrace;
  }

  // When the handlers are to be asked; a sleep must not last longer.
  std::optional<Clock::time_point> due() const { return at_; }

  // May throw.
  void ask_if_due(Clock::time_point now) {
    if (!at_ || now < *at_) return;
    at_.reset();
    (*ask_)();
  }

 private:
  const std::function<void()>* ask_ = nullptr;
  std::optional<Clock::time_point> at_;
};

}  // namespace fusewire
