#include "engine/submission.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "common/error.h"

namespace fusewire {
namespace {

std::string label(const UnitSpec& spec) { return std::string(to_string(spec.kind)) + " '" + spec.name + "': "; }

Error argument_error(const UnitSpec& spec, const std::string& what) {
  return {ErrorCode::kInvalidArgument, label(spec) + what};
}

void check_type(const UnitSpec& spec, DataType dtype) {
  if (reduces(spec.kind) && !supports(dtype, spec.op)) {
    throw Error(ErrorCode::kInvalidType, label(spec) + std::string(to_string(spec.op)) + " has no meaning for " +
                                             std::string(to_string(dtype)) + "; allowed: " + allowed_ops(dtype));
  }
}

void check_rows(const UnitSpec& spec, const Submission& submission) {
  const std::vector<int64_t>& extents = submission.extents;
  const size_t tensors = submission.tensors.size();
  if (tensors == 0 || extents.size() % tensors != 0) {
    throw argument_error(spec, std::to_string(extents.size()) + " extents for " + std::to_string(tensors) + " tensors");
  }
  const auto per_tensor = static_cast<ptrdiff_t>(extents.size() / tensors);
  auto first = extents.begin();
  for (const SubmittedTensor& tensor : submission.tensors) {
    const auto last = first + per_tensor;
    int64_t left = tensor.input.sizes.front();
    for (auto extent = first; extent != last; ++extent) {
      if (*extent < 0) throw argument_error(spec, "a negative number of rows (" + std::to_string(*extent) + ")");
      left = *extent > left ? -1 : left - *extent;
      if (left < 0) break;
    }
    if (left != 0 && !tensor.absent) {
      throw argument_error(spec, "its extents " + to_string(Dims(first, last)) + " do not sum to the " +
                                     std::to_string(tensor.input.sizes.front()) + " rows of the tensor");
    }
    first = last;
  }
}

}  // namespace

UnitSpec describe(Submission& submission) {
  UnitSpec spec;
  static_cast<Operation&>(spec) = submission;
  spec.process_set = submission.process_set;
  spec.name = std::move(submission.name);
  spec.ranks = std::move(submission.ranks);
  if (spec.kind == OpKind::kJoin) spec.name = kJoinName;
  if (spec.kind == OpKind::kAdoptProcessSet) spec.name = adoption_name(spec.ranks);
  spec.tensors.reserve(submission.tensors.size());
  const bool open = has_extents(spec.kind);
  for (const SubmittedTensor& tensor : submission.tensors) {
    const TensorView& input = tensor.input;
    check_type(spec, input.dtype);
    if (input.sizes.empty() && (open || spec.kind == OpKind::kReduceScatter)) {
      throw argument_error(spec, "it needs a first dimension, and a tensor has none");
    }
    spec.tensors.push_back({input.dtype, tensor.wire, input.device.type, input.sizes});
    if (open) spec.tensors.back().shape.front() = -1;
  }
  if (!open) return spec;

  if (spec.kind == OpKind::kAllgather && submission.extents.empty()) {
    for (const SubmittedTensor& tensor : submission.tensors) submission.extents.push_back(tensor.input.sizes.front());
  }
  check_rows(spec, submission);
  for (SubmittedTensor& tensor : submission.tensors) {
    if (!tensor.absent) continue;
    tensor.input.data = nullptr;
    tensor.input.sizes.front() = 0;
  }
  return spec;
}

InFlight unasked(const UnitSpec& spec) {
  InFlight unit;
  static_cast<Operation&>(unit) = spec;
  unit.process_set = spec.process_set;
  for (const TensorSpec& wanted : spec.tensors) {
    SubmittedTensor& tensor = unit.tensors.emplace_back();
    Dims shape = wanted.shape;
    if (has_extents(spec.kind)) shape.front() = 0;
    tensor.input = contiguous_view(nullptr, wanted.dtype, std::move(shape));
    tensor.input.device = {wanted.device, -1};
    tensor.output = tensor.input;
    tensor.wire = wanted.wire;
    tensor.absent = true;
  }
  return unit;
}

}  // namespace fusewire
