// at::Tensor as Fusewire sees it: a TensorView on its memory, and what keeps that memory alive.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "common/types.h"

namespace fusewire::adapter {

// Throws Error(kInvalidType) that lists what is allowed.
DataType data_type(const at::Tensor& tensor);

// The type elements travel in: `wire` where that is narrower than the tensor's floating type, else the tensor's own.
DataType wire_type(DataType dtype, std::optional<DataType> wire);

// Throws Error(kInvalidType) for a tensor that is undefined, sparse, quantized, nested or of an unknown type, and
// Error(kInvalidArgument) for one on a device that this build does not serve.
void check_dense(const at::Tensor& tensor);

// A view for reading, respectively writing. The tensor must be dense, with conj() and neg() resolved.
TensorView read_view(const at::Tensor& tensor);
TensorView write_view(const at::Tensor& tensor);

// Whether two elements of the tensor may share memory (stride 0 and the like): it cannot be written in place.
bool overlaps_itself(const at::Tensor& tensor);

// The tensor itself, or a plain copy where it is a lazily conjugated or negated view.
at::Tensor resolved(const at::Tensor& tensor);

// A new contiguous tensor.
at::Tensor uninitialized(at::IntArrayRef shape, at::ScalarType type, at::Device device = at::kCPU);

// A new tensor with the shape, type, layout and device of `tensor`.
at::Tensor uninitialized_like(const at::Tensor& tensor);

// Tells autograd that the tensor is written behind its back.
void bump_version(const at::Tensor& tensor);

// Keeps the *storage* alive, not the tensor: a reference to a tensor may own its Python object.
std::shared_ptr<void> keep_alive(const at::Tensor& tensor);
std::shared_ptr<void> keep_alive(const std::vector<at::Tensor>& tensors);

}  // namespace fusewire::adapter
