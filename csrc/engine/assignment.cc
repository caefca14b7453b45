#include "engine/assignment.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <string>
#include <utility>

namespace fusewire {
namespace {

using Rows = std::vector<int64_t>;

size_t rank_in_set(const Plane& plane, int32_t global_rank) {
  const auto found = std::lower_bound(plane.ranks.begin(), plane.ranks.end(), global_rank);
  return static_cast<size_t>(found - plane.ranks.begin());
}

// The part of the assignment that tensors of this kind go to. Units that share a bucket agree on everything but, inside
// an explicit group, dtypes and devices; so there are as many parts as there are (dtype, wire, device) triples, nearly
// always one.
Bucket& part_for(std::vector<Bucket>& parts, const InFlight& unit, const SubmittedTensor& tensor, int root) {
  for (Bucket& part : parts) {
    if (part.dtype == tensor.input.dtype && part.wire == tensor.wire && part.device == tensor.input.device.type) {
      return part;
    }
  }
  Bucket& part = parts.emplace_back();
  static_cast<Operation&>(part) = unit;
  part.root = root;
  part.dtype = tensor.input.dtype;
  part.wire = tensor.wire;
  part.device = tensor.input.device.type;
  return part;
}

// What Note [Counts] in collective/backend.h asks for, in rows, from what Note [Extents] in control/message.h gives.
Rows rows_of(const InFlight& unit, size_t tensor, const WorkUnit& work, size_t members) {
  const size_t tensors = unit.tensors.size();
  Rows rows;
  switch (unit.kind) {
    case OpKind::kAllgather:
      for (size_t from = 0; from < members; ++from) rows.push_back(work.extents[from * tensors + tensor]);
      break;
    case OpKind::kAlltoall:
      for (size_t from = 0; from < members; ++from) {
        const auto first = work.extents.begin() + static_cast<ptrdiff_t>((from * tensors + tensor) * members);
        rows.insert(rows.end(), first, first + static_cast<ptrdiff_t>(members));
      }
      break;
    case OpKind::kReduceScatter: {
      const int64_t all = unit.tensors[tensor].input.sizes.front();
      const auto n = static_cast<int64_t>(members);
      for (int64_t member = 0; member < n; ++member) rows.push_back(all / n + (member < all % n ? 1 : 0));
      break;
    }
    default:
      break;
  }
  return rows;
}

// Rows of the result, by the member that they come from.
Rows received(OpKind kind, const Rows& rows, size_t members, size_t me) {
  if (kind == OpKind::kAllgather) return rows;
  Rows column;
  for (size_t from = 0; from < members; ++from) column.push_back(rows[from * members + me]);
  return column;
}

int64_t sum(const Rows& rows) { return std::accumulate(rows.begin(), rows.end(), int64_t{0}); }

// The output of a tensor whose shape is known only now; what is not wanted has no data.
TensorView make_output(const InFlight& unit, size_t tensor, int64_t rows) {
  Dims shape = unit.tensors[tensor].input.sizes;
  shape.front() = rows;
  if (unit.allocate != nullptr) return (*unit.allocate)(tensor, shape);
  TensorView nowhere = contiguous_view(nullptr, unit.tensors[tensor].input.dtype, std::move(shape));
  nowhere.device = unit.tensors[tensor].input.device;
  return nowhere;
}

}  // namespace

Assignment make_assignment(const Work& work, std::vector<InFlight>& units, std::shared_ptr<Plane> plane, int rank) {
  Assignment assignment;
  assignment.bucket = work.bucket;
  assignment.process_set = work.process_set;
  assignment.report_completion = work.report_completion;
  assignment.units.reserve(units.size());
  const size_t members = plane->ranks.size();
  const size_t me = rank_in_set(*plane, rank);
  for (size_t u = 0; u < units.size(); ++u) {
    InFlight& unit = units[u];
    Result result;
    result.skipped = work.units[u].skipped;
    if (work.skip) result.skipped.assign(unit.tensors.size(), true);
    const int root = unit.kind == OpKind::kBroadcast ? static_cast<int>(rank_in_set(*plane, unit.root)) : 0;
    int64_t unit_elements = 0;
    for (size_t t = 0; t < unit.tensors.size(); ++t) {
      SubmittedTensor& tensor = unit.tensors[t];
      Rows counts = rows_of(unit, t, work.units[u], members);
      if (has_extents(unit.kind)) {
        const Rows from = received(unit.kind, counts, members, me);
        result.extents.insert(result.extents.end(), from.begin(), from.end());
        try {
          if (!assignment.failure) tensor.output = make_output(unit, t, sum(from));
        } catch (const std::exception& error) {
          assignment.failure = std::make_shared<Error>(
              ErrorCode::kCollective,
              "rank " + std::to_string(rank) + " could not make room for the result of an " +
                  std::string(to_string(unit.kind)) + " (" + std::to_string(sum(from)) + " rows): " + error.what(),
              rank);
        }
      }
      if (!result.skipped.empty() && result.skipped[t]) continue;
      Bucket& part = part_for(assignment.parts, unit, tensor, root);
      const int64_t elements = tensor.input.numel();
      part.elements += elements;
      unit_elements += elements;
      const int64_t moved = std::max(elements, tensor.output.numel());
      assignment.bytes += moved * static_cast<int64_t>(size_of(tensor.wire));
      if (!counts.empty()) {
        const Dims& sizes = tensor.input.sizes;
        const int64_t row = numel(Dims(sizes.begin() + 1, sizes.end()));
        for (int64_t& count : counts) count *= row;
      }
      part.segments.push_back({std::move(tensor.input), std::move(tensor.output), std::move(counts)});
    }
    if (unit.handle) assignment.units.push_back({nullptr, std::move(result), unit_elements, unit.trace});
  }
  auto finished = assignment.units.begin();
  for (InFlight& unit : units) {
    if (unit.handle) (finished++)->handle = std::move(unit.handle);
  }
  assignment.plane = std::move(plane);
  return assignment;
}

}  // namespace fusewire
