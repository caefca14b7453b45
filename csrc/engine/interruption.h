// A caller whose wait a signal's handler ends while it runs a bucket.
#pragma once

#include <exception>
#include <functional>
#include <memory>
#include <string>

#include "common/error.h"

namespace fusewire {

// Stands between the caller's handlers, which throw whatever they like, and the data plane, which is given an Error of
// ours in its place: the one that all ranks will raise. The caller gets its own back with rethrow().
class Interruption {
 public:
  // `on_signal` must outlive it; it may be empty.
  Interruption(const std::function<void()>& on_signal, int rank) : on_signal_(on_signal), rank_(rank) {}
  Interruption(const Interruption&) = delete;
  Interruption& operator=(const Interruption&) = delete;

  const std::function<void()>* ask() const { return on_signal_ ? &ask_ : nullptr; }  // for Bucket::on_signal
  const std::shared_ptr<const Error>& error() const { return error_; }               // null: nothing was thrown
  [[noreturn]] void rethrow() const { std::rethrow_exception(thrown_); }

 private:
  void ask_handlers() {
    try {
      on_signal_();
    } catch (...) {
      thrown_ = std::current_exception();
      // kPeerLost: whoever is told only that the data plane was stopped waits to hear why.
      error_ = std::make_shared<const Error>(
          ErrorCode::kPeerLost,
          "rank " + std::to_string(rank_) +
              " was interrupted by a signal (such as Ctrl-C) inside a collective that all its ranks had started, and "
              "without it that cannot end. Call shutdown(), or restart the job.",
          rank_);
      throw *error_;
    }
  }

  const std::function<void()>& on_signal_;
  const int rank_;
  const std::function<void()> ask_ = [this] { ask_handlers(); };  // small enough to need no memory
  std::exception_ptr thrown_;
  std::shared_ptr<const Error> error_;
};

}  // namespace fusewire
