#include "torch/grad_leftovers.h"

#include <ATen/Functions.h>

namespace fusewire {

void Leftovers::give_back(const Answers& answers) {
  answers.gpu->device()->give_back(GpuMemory::kPinned, answers.pinned, answers.there);
}

Leftovers::~Leftovers() {
  for (const Answers& answers : answers_) give_back(answers);
}

void Leftovers::look(const std::string& name, const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  const at::Tensor values = gradient.layout() == at::kStrided ? gradient : gradient.to_dense();
  asked_.emplace_back(name, values.ne(0).any());
}

std::string Leftovers::collect(const gpu::Gpu& gpu) {
  std::string found;
  while (!answers_.empty() && answers_.front().there->reached()) {
    const Answers& answers = answers_.front();
    const auto* left = static_cast<const bool*>(answers.pinned);
    for (size_t i = 0; i < answers.names.size() && found.empty(); ++i) {
      if (left[i]) found = answers.names[i];
    }
    give_back(answers);
    answers_.pop_front();
  }
  if (asked_.empty()) return found;
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> flags;
  std::vector<std::string> names;
  for (auto& [name, flag] : asked_) {
    names.push_back(std::move(name));
    flags.push_back(std::move(flag));
  }
  asked_.clear();
  const at::Tensor together = at::stack(flags);
  GpuDevice& device = *gpu.device();
  void* const pinned = device.borrow(GpuMemory::kPinned, names.size());
  device.api().copy(pinned, together.const_data_ptr(), names.size(), gpu.current_stream());
  answers_.push_back({&gpu, std::move(names), pinned, device.mark(gpu.current_stream())});
  return found;
}

}  // namespace fusewire
