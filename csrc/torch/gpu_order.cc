#include "torch/gpu_order.h"

#include <utility>

namespace fusewire::gpu {
namespace {

struct Kept {
  std::shared_ptr<void> memory;
  std::vector<SharedEvent> events;
};

}  // namespace

void follow_current(binding::PyEngine& engine, Submission& submission, std::vector<SharedEvent> events) {
  SharedEvent mark;
  const auto follow = [&](TensorView& view) {
    if (view.device.type != DeviceType::kCuda) [[likely]]
      return;
    const Gpu& gpu = engine.gpu(view.device.index);
    if (view.data == nullptr || view.ready_event != nullptr) return;
    if (!mark) events.push_back(mark = gpu.mark_current());
    view.ready_event = mark->get();
  };
  for (SubmittedTensor& tensor : submission.tensors) {
    follow(tensor.input);
    follow(tensor.output);
  }
  if (events.empty()) [[likely]]
    return;
  submission.keep_alive = std::make_shared<Kept>(std::move(submission.keep_alive), std::move(events));
}

void hold_up_current(binding::PyEngine& engine, std::span<const Handle> handles) {
  const GpuEvent* last = nullptr;  // units of one bucket share their event, and mostly come one after the other
  for (const Handle& handle : handles) {
    if (!handle->done() || !handle->event() || handle->event().get() == last) continue;
    last = handle->event().get();
    engine.gpu().hold_up_current(*last);
  }
}

}  // namespace fusewire::gpu
