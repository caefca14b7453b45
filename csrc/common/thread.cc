#include "common/thread.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <utility>

namespace fusewire {
namespace {

// A thread inherits the mask of the one that starts it.
class NoSignals {
 public:
  NoSignals() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~NoSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  NoSignals(const NoSignals&) = delete;
  NoSignals& operator=(const NoSignals&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

std::thread start_thread(const char* name, std::function<void()> body) {
  const NoSignals none;
  return std::thread([name, body = std::move(body)] {
    pthread_setname_np(pthread_self(), name);
    const sched_param param{};
    pthread_setschedparam(pthread_self(), SCHED_BATCH, &param);  // a hint: a refusal changes nothing
    body();
  });
}

}  // namespace fusewire
