// A GPU as one engine uses it: the stream that all its work goes to, events from a pool, and memory that is reused once
// the work that used it is done.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "collective/cuda_api.h"

namespace fusewire {

// Events that are used again. Thread-safe; its mutex is a leaf but for CudaApi.
class GpuEventPool {
 public:
  explicit GpuEventPool(std::shared_ptr<CudaApi> api) : api_(std::move(api)) {}
  ~GpuEventPool();
  GpuEventPool(const GpuEventPool&) = delete;
  GpuEventPool& operator=(const GpuEventPool&) = delete;

  CudaApi& api() const { return *api_; }
  CudaApi::Event take(bool timed);
  void put_back(CudaApi::Event event, bool timed);

 private:
  const std::shared_ptr<CudaApi> api_;
  std::mutex mutex_;
  std::array<std::vector<CudaApi::Event>, 2> free_;  // plain, timed
};

// An event that has been recorded once. When the last owner lets go, it goes back to the pool.
class GpuEvent {
 public:
  GpuEvent(std::shared_ptr<GpuEventPool> pool, CudaApi::Stream stream, bool timed);  // records it
  ~GpuEvent() { pool_->put_back(event_, timed_); }
  GpuEvent(const GpuEvent&) = delete;
  GpuEvent& operator=(const GpuEvent&) = delete;

  CudaApi::Event get() const { return event_; }
  bool reached() const { return pool_->api().reached(event_); }
  void synchronize() const { pool_->api().synchronize(event_); }
  // What is put on the stream from now on comes after the event.
  void hold_up(CudaApi::Stream stream) const { pool_->api().wait(stream, event_); }

 private:
  const std::shared_ptr<GpuEventPool> pool_;
  const bool timed_;
  const CudaApi::Event event_;
};

using SharedEvent = std::shared_ptr<const GpuEvent>;

// Note [Memory in use]
// Work on a stream uses memory after the call that put it there has returned. So whoever has borrowed memory gives it
// back together with an event that comes after that work, and it is lent again only when the event has been reached.
// Torch's allocator is not asked: a plane must not fail because a model has filled the GPU to the last page in between,
// and memory that NCCL registers has to stay.
enum class GpuMemory : uint8_t { kDevice, kPinned };

// Thread-safe. Lock order: mutex_ is a leaf but for CudaApi.
class GpuDevice {
 public:
  // `stream` is somebody else's and outlives this.
  GpuDevice(std::shared_ptr<CudaApi> api, int index, CudaApi::Stream stream)
      : api_(std::move(api)), index_(index), stream_(stream), events_(std::make_shared<GpuEventPool>(api_)) {}
  ~GpuDevice();  // nothing may be in flight
  GpuDevice(const GpuDevice&) = delete;
  GpuDevice& operator=(const GpuDevice&) = delete;

  CudaApi& api() const { return *api_; }
  int index() const { return index_; }
  CudaApi::Stream stream() const { return stream_; }

  // An event that comes after all that has been put on the stream.
  SharedEvent mark(CudaApi::Stream stream, bool timed = false) {
    return std::make_shared<const GpuEvent>(events_, stream, timed);
  }
  SharedEvent mark() { return mark(stream_); }

  // At least `bytes`, aligned to 256.
  void* borrow(GpuMemory kind, size_t bytes);
  void give_back(GpuMemory kind, void* memory, SharedEvent after);

 private:
  struct Block {
    void* memory = nullptr;
    size_t bytes = 0;
    SharedEvent busy_until{};
  };
  struct Pool {
    std::vector<Block> free;
    std::map<void*, size_t> lent;
  };

  void* allocate(GpuMemory kind, size_t bytes);
  bool release_unused(Pool& pool, GpuMemory kind);

  const std::shared_ptr<CudaApi> api_;
  const int index_;
  const CudaApi::Stream stream_;
  const std::shared_ptr<GpuEventPool> events_;
  std::mutex mutex_;
  std::array<Pool, 2> pools_;  // one for each kind
};

// Borrowed memory. It goes back with an event that comes after all work on the device's stream so far.
class GpuLoan {
 public:
  GpuLoan() = default;
  GpuLoan(GpuDevice& device, GpuMemory kind, size_t bytes)
      : device_(&device), kind_(kind), memory_(device.borrow(kind, bytes)) {}
  ~GpuLoan() { end(); }
  GpuLoan(GpuLoan&& other) noexcept
      : device_(other.device_), kind_(other.kind_), memory_(std::exchange(other.memory_, nullptr)) {}
  GpuLoan& operator=(GpuLoan&& other) noexcept {
    end();
    device_ = other.device_;
    kind_ = other.kind_;
    memory_ = std::exchange(other.memory_, nullptr);
    return *this;
  }

  void* get() const { return memory_; }

 private:
  void end() noexcept;

  GpuDevice* device_ = nullptr;
  GpuMemory kind_ = GpuMemory::kDevice;
  void* memory_ = nullptr;
};

}  // namespace fusewire
