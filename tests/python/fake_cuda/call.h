// One call of an operator whose tensors are on a pretended GPU, by the CPU's kernel.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/boxing/KernelFunction.h>
#include <ATen/core/stack.h>

#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "fake_cuda/gpu.h"

namespace fusewire::fake {

// Note [CPU kernels]
// Every CUDA tensor among the arguments is shown to the CPU's kernel as a CPU tensor over the same memory, every CUDA
// device as the CPU. What comes back is translated the other way: an argument's stand-in becomes the argument itself
// (after it has taken over the sizes and the memory that the kernel has given it), a view of an argument's memory a
// CUDA tensor on that argument's storage, and anything new a CUDA tensor on the memory that the kernel has made.
class Call {
 public:
  Call(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(stack) {}
  void run();

 private:
  c10::IValue to_cpu(const c10::IValue& value);
  at::Tensor to_cpu(const at::Tensor& tensor);
  c10::Storage to_cpu(const c10::Storage& storage);
  c10::IValue from_cpu(const c10::IValue& value);
  at::Tensor from_cpu(const at::Tensor& tensor);
  c10::Storage from_cpu(const c10::Storage& storage);
  void take_over(const at::Tensor& original, const at::Tensor& stand_in);
  void take_over_storages();
  void use(const at::Tensor& tensor, bool writes);
  std::optional<c10::Device> find_device() const;
  std::vector<CudaApi::Stream> other_streams(CudaApi::Stream own) const;

  const c10::OperatorHandle& op_;
  torch::jit::Stack* const stack_;
  std::vector<std::pair<at::Tensor, at::Tensor>> stand_ins_;                           // CUDA, CPU
  std::map<const c10::StorageImpl*, std::pair<c10::Storage, c10::Storage>> storages_;  // by the CUDA one: CUDA, CPU
  std::vector<testing::CudaDouble::Use> uses_;
};

}  // namespace fusewire::fake
