#include "engine/thread.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <utility>

namespace fusewire {

std::thread start_thread(const char* name, std::function<void()> body) {
  sigset_t all;
  sigset_t before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // the new thread inherits the mask
  std::thread thread([name, body = std::move(body)] {
    pthread_setname_np(pthread_self(), name);
    const sched_param param{};
    pthread_setschedparam(pthread_self(), SCHED_BATCH, &param);  // a hint: a refusal changes nothing
    body();
  });
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  return thread;
}

}  // namespace fusewire
