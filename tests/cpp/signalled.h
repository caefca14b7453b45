// Signals for a thread that waits inside of a data plane.
#pragma once

#include <pthread.h>

#include <chrono>
#include <csignal>
#include <functional>
#include <thread>

namespace fusewire::testing {

// Sends SIGUSR1, whose handler does nothing but cut system calls short, to the thread until `enough` says so: one that
// comes while the plane copies is lost.
inline void signal_until(pthread_t thread, const std::function<bool()>& enough) {
  struct sigaction action{};
  action.sa_handler = [](int) {};
  sigaction(SIGUSR1, &action, nullptr);
  while (!enough()) {
    pthread_kill(thread, SIGUSR1);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace fusewire::testing
