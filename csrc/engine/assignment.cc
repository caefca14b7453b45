#include "engine/assignment.h"

#include <algorithm>
#include <utility>

namespace fusewire {
namespace {

int rank_in_set(const Plane& plane, int32_t global_rank) {
  const auto found = std::lower_bound(plane.ranks.begin(), plane.ranks.end(), global_rank);
  return static_cast<int>(found - plane.ranks.begin());
}

// The part of the assignment that tensors of this kind go to. Units that share a bucket agree on everything but, inside
// an explicit group, the dtypes; so there are as many parts as there are (dtype, wire) pairs, nearly always one.
Bucket& part_for(std::vector<Bucket>& parts, const InFlight& unit, const SubmittedTensor& tensor, int root) {
  for (Bucket& part : parts) {
    if (part.dtype == tensor.input.dtype && part.wire == tensor.wire) return part;
  }
  Bucket& part = parts.emplace_back();
  static_cast<Operation&>(part) = unit;
  part.root = root;
  part.dtype = tensor.input.dtype;
  part.wire = tensor.wire;
  return part;
}

}  // namespace

Assignment make_assignment(const Work& work, std::vector<InFlight> units, std::shared_ptr<Plane> plane) {
  Assignment assignment;
  assignment.bucket = work.bucket;
  assignment.report_completion = work.report_completion;
  assignment.units.reserve(units.size());
  for (size_t u = 0; u < units.size(); ++u) {
    InFlight& unit = units[u];
    const std::vector<bool>& skipped = work.units[u].skipped;
    const int root = unit.kind == OpKind::kBroadcast ? rank_in_set(*plane, unit.root) : 0;
    for (size_t t = 0; t < unit.tensors.size(); ++t) {
      if (!skipped.empty() && skipped[t]) continue;
      SubmittedTensor& tensor = unit.tensors[t];
      Bucket& part = part_for(assignment.parts, unit, tensor, root);
      const int64_t elements = tensor.input.numel();
      part.elements += elements;
      assignment.bytes += elements * static_cast<int64_t>(size_of(tensor.wire));
      part.segments.push_back({std::move(tensor.input), std::move(tensor.output)});
    }
    assignment.units.push_back({std::move(unit.handle), skipped});
  }
  assignment.plane = std::move(plane);
  return assignment;
}

}  // namespace fusewire
