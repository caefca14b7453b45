// The buffer that tensors are fused in.
//
// Note [One buffer]
// Everything that a plane puts on its device is on one stream: the pack of a bucket comes after the unpack of the one
// before, so one buffer serves all of them, and the host never waits for it.
//
// Note [Windows]
// From 2.27 on, NCCL has kernels for memory that all members have registered together (symmetric windows), if all of
// them use it at the same offset. So the buffer grows at the same bucket on all members: its size follows from what
// they know alike. Whether all of them have the memory is agreed over the CPU plane each time it grows, which is a few
// times in a job; where one has not, none uses a window from then on, and the buffer is ordinary memory. To register
// is a collective itself: where there is no direct way NCCL gives no window and goes on as ever, and a member for which
// it fails leaves the others waiting inside, so that is an error of all.
#pragma once

#include <cstddef>

#include "collective/nccl/nccl_link.h"

namespace fusewire {

class NcclBuffer {
 public:
  explicit NcclBuffer(NcclLink& link) : link_(link), windows_(link.size() > 1) {}
  NcclBuffer(const NcclBuffer&) = delete;
  NcclBuffer& operator=(const NcclBuffer&) = delete;

  // Room for `bytes`, the same on all members, for work that is put on the stream from now on. What the buffer held is
  // lost. May wait for the stream, when it grows.
  std::byte* reserve(size_t bytes);

  // At the end: while the communicator still works, and when it is gone (then the stream is at rest, too).
  void leave();
  void free() noexcept;

 private:
  bool agree(bool mine);
  bool grow_window(size_t bytes);

  NcclLink& link_;
  bool windows_;
  size_t bytes_ = 0;
  void* memory_ = nullptr;  // of NCCL's, with a window or about to get one
  NcclWindow window_ = nullptr;
  GpuLoan loan_;  // where there are no windows
};

}  // namespace fusewire
