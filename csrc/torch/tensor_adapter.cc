#include "torch/tensor_adapter.h"

#include <ATen/EmptyTensor.h>
#include <ATen/Functions.h>
#include <ATen/MemoryOverlap.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>

#include "common/error.h"
#include "torch/gpu.h"

namespace fusewire::adapter {
namespace {

constexpr const char* kAllowedTypes =
    "uint8, int8, uint16, int16, uint32, int32, uint64, int64, float16, bfloat16, float32, float64, bool, complex64, "
    "complex128";

TensorView make_view(const at::Tensor& tensor, void* data) {
  TensorView view;
  view.data = data;
  view.dtype = data_type(tensor);
  if (tensor.is_cuda()) view.device = {DeviceType::kCuda, static_cast<int8_t>(tensor.get_device())};
  const auto sizes = tensor.sizes();
  const auto strides = tensor.strides();
  view.sizes.assign(sizes.begin(), sizes.end());
  view.strides.assign(strides.begin(), strides.end());
  return view;
}

}  // namespace

DataType data_type(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kByte:
      return DataType::kUInt8;
    case at::kChar:
      return DataType::kInt8;
    case at::kUInt16:
      return DataType::kUInt16;
    case at::kShort:
      return DataType::kInt16;
    case at::kUInt32:
      return DataType::kUInt32;
    case at::kInt:
      return DataType::kInt32;
    case at::kUInt64:
      return DataType::kUInt64;
    case at::kLong:
      return DataType::kInt64;
    case at::kHalf:
      return DataType::kFloat16;
    case at::kBFloat16:
      return DataType::kBFloat16;
    case at::kFloat:
      return DataType::kFloat32;
    case at::kDouble:
      return DataType::kFloat64;
    case at::kBool:
      return DataType::kBool;
    case at::kComplexFloat:
      return DataType::kComplex64;
    case at::kComplexDouble:
      return DataType::kComplex128;
    default:
      throw Error(ErrorCode::kInvalidType, std::string("tensors of dtype ") + at::toString(tensor.scalar_type()) +
                                               " cannot be communicated; allowed: " + kAllowedTypes);
  }
}

DataType wire_type(DataType dtype, std::optional<DataType> wire) {
  return wire && is_floating(dtype) && size_of(*wire) < size_of(dtype) ? *wire : dtype;
}

void check_dense(const at::Tensor& tensor) {
  if (!tensor.defined()) throw Error(ErrorCode::kInvalidType, "expected a tensor, got an undefined one");
  if (tensor.layout() != at::kStrided || tensor.is_quantized() || tensor.is_nested()) {
    throw Error(ErrorCode::kInvalidType,
                "only dense tensors (layout torch.strided) can be communicated, got a sparse, quantized or nested one; "
                "convert it with to_dense() or dequantize()");
  }
  if (tensor.is_cpu()) return;
  const std::string where = "the tensor is on device " + tensor.device().str() + "; ";
  if (!tensor.is_cuda()) throw Error(ErrorCode::kInvalidArgument, where + "Fusewire moves tensors of: cpu, cuda");
  if (!gpu::obstacle().empty()) throw Error(ErrorCode::kInvalidArgument, where + gpu::obstacle());
}

TensorView read_view(const at::Tensor& tensor) {
  return make_view(tensor, const_cast<void*>(tensor.const_data_ptr()));  // read only: never materializes a lazy copy
}

TensorView write_view(const at::Tensor& tensor) { return make_view(tensor, tensor.mutable_data_ptr()); }

bool overlaps_itself(const at::Tensor& tensor) {
  if (tensor.is_non_overlapping_and_dense()) return false;
  // "Too hard" is what torch answers for any gap that it cannot prove harmless: sort the dimensions by stride and see
  // whether each one steps over all that the smaller ones reach.
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes) return true;
  std::vector<std::pair<int64_t, int64_t>> dims;  // stride, size
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) == 0) return false;
    if (tensor.size(d) > 1) dims.emplace_back(tensor.stride(d), tensor.size(d));
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;  // the largest offset that the dimensions so far reach
  for (const auto& [stride, size] : dims) {
    if (stride <= reach) return true;
    reach += stride * (size - 1);
  }
  return false;
}

at::Tensor resolved(const at::Tensor& tensor) {
  if (!tensor.is_conj() && !tensor.is_neg()) return tensor;
  at::NoGradGuard no_grad;
  return tensor.resolve_conj().resolve_neg();
}

at::Tensor uninitialized(at::IntArrayRef shape, at::ScalarType type, at::Device device) {
  if (!device.is_cpu()) {
    const at::NoGradGuard no_grad;
    return at::empty(shape, at::TensorOptions(type).device(device));
  }
  at::Tensor result(at::detail::empty_cpu(shape, type));
  // Memory this large comes fresh from the kernel, and a fault for each of its small pages would cost more than the
  // collective itself. Advice only: it may be refused.
  constexpr size_t kLarge = 4U << 20;
  if (result.nbytes() >= kLarge) {
    constexpr uintptr_t kPage = 4096;
    const auto begin = (reinterpret_cast<uintptr_t>(result.mutable_data_ptr()) + kPage - 1) & ~(kPage - 1);
    const auto end = (reinterpret_cast<uintptr_t>(result.mutable_data_ptr()) + result.nbytes()) & ~(kPage - 1);
    static_cast<void>(madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE));
  }
  return result;
}

at::Tensor uninitialized_like(const at::Tensor& tensor) {
  if (tensor.is_contiguous() && tensor.device().is_cpu()) {
    return uninitialized(tensor.sizes(), tensor.scalar_type());  // a fifth of empty_like's time
  }
  at::NoGradGuard no_grad;
  return at::empty_like(tensor);
}

void bump_version(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

std::shared_ptr<void> keep_alive(const at::Tensor& tensor) { return std::make_shared<c10::Storage>(tensor.storage()); }

std::shared_ptr<void> keep_alive(const std::vector<at::Tensor>& tensors) {
  auto storages = std::make_shared<std::vector<c10::Storage>>();
  storages->reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) storages->push_back(tensor.storage());
  return storages;
}

}  // namespace fusewire::adapter
