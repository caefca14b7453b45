// What lets the GPUs of a test wait for each other.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <vector>

namespace fusewire::testing {

class CudaDouble;

// GPUs of one test whose work waits for each other's (launch_when). Who waits for the work of one lets all of them go
// on, as GPUs do by themselves, and sleeps while none can.
//
// Lock order: gpus_mutex_, then a GPU's own, then whatever its work takes, then changes_mutex_.
class CudaWorld {
 public:
  void add(CudaDouble& gpu);
  void remove(CudaDouble& gpu);
  void changed();  // something may be able to go on
  uint64_t changes();
  bool step();                // one piece of work on any of them; false: none may run
  void wait(uint64_t since);  // for a change after the `since`th

 private:
  std::mutex gpus_mutex_;
  std::vector<CudaDouble*> gpus_;
  std::mutex changes_mutex_;
  std::condition_variable changed_;
  uint64_t changes_ = 0;
};

}  // namespace fusewire::testing
