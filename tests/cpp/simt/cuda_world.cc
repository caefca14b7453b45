#include "simt/cuda_world.h"

#include "simt/cuda_double.h"

namespace fusewire::testing {

void CudaWorld::add(CudaDouble& gpu) {
  const std::lock_guard lock(gpus_mutex_);
  gpus_.push_back(&gpu);
}

void CudaWorld::remove(CudaDouble& gpu) {
  const std::lock_guard lock(gpus_mutex_);
  std::erase(gpus_, &gpu);
}

void CudaWorld::changed() {
  const std::lock_guard lock(changes_mutex_);
  ++changes_;
  changed_.notify_all();
}

uint64_t CudaWorld::changes() {
  const std::lock_guard lock(changes_mutex_);
  return changes_;
}

bool CudaWorld::step() {
  const std::lock_guard lock(gpus_mutex_);
  bool any = false;
  for (CudaDouble* gpu : gpus_) any = gpu->step_if_possible() || any;
  return any;
}

void CudaWorld::wait(uint64_t since) {
  std::unique_lock lock(changes_mutex_);
  changed_.wait(lock, [&] { return changes_ != since; });
}

}  // namespace fusewire::testing
