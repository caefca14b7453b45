#include "collective/nccl/nccl_buffer.h"

#include <algorithm>
#include <bit>
#include <span>
#include <utility>

#include "collective/host_exchange.h"

namespace fusewire {
namespace {

constexpr size_t kSmallest = 1 << 20;

}  // namespace

std::byte* NcclBuffer::reserve(size_t bytes) {
  if (bytes > bytes_) {
    const size_t size = std::bit_ceil(std::max(bytes, kSmallest));
    if (windows_ && !grow_window(size)) windows_ = false;
    if (!windows_) loan_ = GpuLoan(link_.device(), GpuMemory::kDevice, size);
    bytes_ = size;
  }
  return static_cast<std::byte*>(windows_ ? memory_ : loan_.get());
}

// Whether all members say so.
bool NcclBuffer::agree(bool mine) {
  const std::byte word{mine};
  const auto all = exchange_on_host(link_.cpu(), link_.size(), std::span(&word, 1));
  return std::all_of(all.begin(), all.end(), [](std::byte one) { return one == std::byte{1}; });
}

bool NcclBuffer::grow_window(size_t bytes) {
  NcclApi& api = link_.api();
  if (memory_ != nullptr) {
    link_.device().mark()->synchronize();
    leave();
    static_cast<void>(api.mem_free(std::exchange(memory_, nullptr)));
  }
  bool mine = api.supports_memory() && api.supports_windows();
  if (mine) {
    link_.device().api().with_current([&] { mine = api.mem_alloc(&memory_, bytes) == NcclResult::kSuccess; });
  }
  if (agree(mine)) {
    link_.launch("registering a window", [&](NcclComm comm) {
      return api.window_register(comm, memory_, bytes, window_, kNcclWindowSymmetric);
    });
    return true;
  }
  if (memory_ != nullptr) static_cast<void>(api.mem_free(std::exchange(memory_, nullptr)));
  return false;
}

void NcclBuffer::leave() {
  if (window_ == nullptr) return;
  const NcclWindow window = std::exchange(window_, nullptr);
  link_.launch("giving up a window", [&](NcclComm comm) { return link_.api().window_deregister(comm, window); });
}

void NcclBuffer::free() noexcept {
  if (memory_ != nullptr) static_cast<void>(link_.api().mem_free(std::exchange(memory_, nullptr)));
  loan_ = GpuLoan();
  bytes_ = 0;
}

}  // namespace fusewire
