#include "fake_cuda/memory.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "fake_cuda/gpu.h"

namespace fusewire::fake {
namespace {

struct Block {
  void* memory = nullptr;
  size_t bytes = 0;
  c10::DataPtr owner;
  CudaApi::Stream stream = nullptr;
  std::mutex mutex{};
  std::set<CudaApi::Stream> others{};
};

void release(void* context) {
  const std::unique_ptr<Block> block(static_cast<Block*>(context));
  if (block->memory == nullptr || block->bytes == 0) return;
  Gpu& gpu = Gpu::get();
  for (const CudaApi::Stream other : block->others) {
    const CudaApi::Event event = gpu.create_event(false);
    gpu.record(event, other);
    gpu.wait(block->stream, event);
    gpu.destroy_event(event);
  }
  gpu.forget(block->memory, block->bytes, block->stream);
}

class Memory : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr host = c10::GetAllocator(c10::DeviceType::CPU)->allocate(bytes);
    if (bytes > 0) std::memset(host.get(), 0xdb, bytes);  // whoever reads it unwritten shall notice
    return adopt(std::move(host), bytes);
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

std::mutex pinned_mutex;
std::map<uintptr_t, size_t>& pinned_ranges() {
  static auto* const ranges = new std::map<uintptr_t, size_t>;
  return *ranges;
}

class Pinned : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto owner = std::make_unique<c10::DataPtr>(c10::GetAllocator(c10::DeviceType::CPU)->allocate(bytes));
    void* const memory = owner->get();
    const std::lock_guard lock(pinned_mutex);
    pinned_ranges()[reinterpret_cast<uintptr_t>(memory)] = bytes;
    return {memory, owner.release(),
            [](void* context) {
              const std::unique_ptr<c10::DataPtr> owner(static_cast<c10::DataPtr*>(context));
              const std::lock_guard lock(pinned_mutex);
              pinned_ranges().erase(reinterpret_cast<uintptr_t>(owner->get()));
            },
            c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

}  // namespace

c10::Allocator& allocator() {
  static auto* const memory = new Memory;
  return *memory;
}

c10::DataPtr adopt(c10::DataPtr owner, size_t bytes) {
  const c10::Device device(c10::DeviceType::CUDA, current_device());
  void* const memory = owner.get();
  auto block = std::make_unique<Block>();
  block->memory = memory;
  block->bytes = bytes;
  block->owner = std::move(owner);
  block->stream = Gpu::get().handle(current_stream(device.index()));
  return {memory, block.release(), &release, device};
}

void record_stream(const c10::DataPtr& memory, const c10::Stream& stream) {
  if (memory.get_deleter() != &release) return;
  Block& block = *static_cast<Block*>(memory.get_context());
  const CudaApi::Stream handle = Gpu::get().handle(stream);
  const std::lock_guard lock(block.mutex);
  if (handle != block.stream) block.others.insert(handle);
}

c10::Allocator& pinned_allocator() {
  static auto* const pinned = new Pinned;
  return *pinned;
}

bool is_pinned(const void* memory) {
  const std::lock_guard lock(pinned_mutex);
  const auto at = reinterpret_cast<uintptr_t>(memory);
  const auto after = pinned_ranges().upper_bound(at);
  return after != pinned_ranges().begin() && at < std::prev(after)->first + std::prev(after)->second;
}

}  // namespace fusewire::fake
