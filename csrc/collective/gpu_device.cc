#include "collective/gpu_device.h"

#include <algorithm>
#include <bit>
#include <exception>

#include "common/error.h"

namespace fusewire {
namespace {

size_t index_of(GpuMemory kind) { return static_cast<size_t>(kind); }

// Few sizes, so that a block serves many callers: powers of two, and from 1 MB on quarters between them.
size_t rounded(size_t bytes) {
  constexpr size_t kSmallest = 4096;
  constexpr size_t kFine = 1U << 20;
  const size_t power = std::bit_ceil(std::max(bytes, kSmallest));
  if (power <= kFine) return power;
  const size_t step = power / 8;  // of [power / 2, power]
  return (bytes + step - 1) / step * step;
}

}  // namespace

GpuEventPool::~GpuEventPool() {
  // At the end of a process the driver may be gone already: nothing is left to be freed then.
  try {
    for (const auto& events : free_) {
      for (const CudaApi::Event event : events) api_->destroy_event(event);
    }
  } catch (const Error&) {
  }
}

CudaApi::Event GpuEventPool::take(bool timed) {
  {
    const std::lock_guard lock(mutex_);
    auto& free = free_[timed ? 1 : 0];
    if (!free.empty()) {
      const CudaApi::Event event = free.back();
      free.pop_back();
      return event;
    }
  }
  return api_->create_event(timed);
}

void GpuEventPool::put_back(CudaApi::Event event, bool timed) {
  const std::lock_guard lock(mutex_);
  free_[timed ? 1 : 0].push_back(event);
}

GpuEvent::GpuEvent(std::shared_ptr<GpuEventPool> pool, CudaApi::Stream stream, bool timed)
    : pool_(std::move(pool)), timed_(timed), event_(pool_->take(timed)) {
  pool_->api().record(event_, stream);
}

GpuDevice::~GpuDevice() {
  try {  // as in ~GpuEventPool
    for (const Block& block : pools_[index_of(GpuMemory::kDevice)].free) api_->free(block.memory);
    for (const Block& block : pools_[index_of(GpuMemory::kPinned)].free) api_->free_pinned(block.memory);
  } catch (const Error&) {
  }
}

void* GpuDevice::allocate(GpuMemory kind, size_t bytes) {
  return kind == GpuMemory::kPinned ? api_->allocate_pinned(bytes) : api_->allocate(bytes);
}

// Frees what nobody uses. False: there was nothing.
bool GpuDevice::release_unused(Pool& pool, GpuMemory kind) {
  return std::erase_if(pool.free, [&](const Block& block) {
           if (block.busy_until && !block.busy_until->reached()) return false;
           kind == GpuMemory::kPinned ? api_->free_pinned(block.memory) : api_->free(block.memory);
           return true;
         }) != 0;
}

void* GpuDevice::borrow(GpuMemory kind, size_t bytes) {
  const size_t wanted = rounded(bytes);
  const std::lock_guard lock(mutex_);
  Pool& pool = pools_[index_of(kind)];
  // The smallest that is large enough, but not so large that somebody else will miss it.
  auto best = pool.free.end();
  for (auto block = pool.free.begin(); block != pool.free.end(); ++block) {
    if (block->bytes < wanted || block->bytes > 2 * wanted) continue;
    if (best != pool.free.end() && best->bytes <= block->bytes) continue;
    if (block->busy_until && !block->busy_until->reached()) continue;
    best = block;
  }
  Block chosen{.memory = nullptr, .bytes = wanted};
  if (best != pool.free.end()) {
    chosen = std::move(*best);
    pool.free.erase(best);
  } else {
    try {
      chosen.memory = allocate(kind, wanted);
    } catch (const Error&) {
      if (!release_unused(pool, kind)) throw;
      chosen.memory = allocate(kind, wanted);
    }
  }
  pool.lent[chosen.memory] = chosen.bytes;
  return chosen.memory;
}

void GpuDevice::give_back(GpuMemory kind, void* memory, SharedEvent after) {
  const std::lock_guard lock(mutex_);
  Pool& pool = pools_[index_of(kind)];
  const auto lent = pool.lent.find(memory);
  pool.free.push_back({memory, lent->second, std::move(after)});
  pool.lent.erase(lent);
}

void GpuLoan::end() noexcept {
  if (memory_ == nullptr) return;
  try {
    device_->give_back(kind_, std::exchange(memory_, nullptr), device_->mark());
  } catch (const std::exception&) {
    // CUDA has failed, and so will all that comes: the memory stays lent.
  }
}

}  // namespace fusewire
