#include "control/unit.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace fusewire {
namespace {

bool same(double a, double b) { return a == b || (a != a && b != b); }

int64_t widest(const TensorSpec& tensor) {
  return static_cast<int64_t>(std::max(size_of(tensor.dtype), size_of(tensor.wire)));
}

int64_t saturating_add(int64_t a, int64_t b) {
  int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<int64_t>::max() : sum;
}

}  // namespace

Description::Description(UnitSpec unit) : spec(std::move(unit)) {
  cacheable =
      !changes_sets(spec.kind) && spec.kind != OpKind::kJoin && spec.name.find(kUnnamedMark) == std::string::npos;
  static_cast<Operation&>(key) = spec;
  fusible = moves_data(spec.kind) && !spec.tensors.empty();
  if (!fusible) return;
  const bool bytes_known = !has_extents(spec.kind);
  key.dtype = spec.tensors.front().dtype;
  key.wire = spec.tensors.front().wire;
  key.device = spec.tensors.front().device;
  for (const TensorSpec& tensor : spec.tensors) {
    if (tensor.dtype != key.dtype || tensor.wire != key.wire || tensor.device != key.device) fusible = false;
    if (bytes_known) {
      bytes = saturating_add(bytes, numel(tensor.shape) * static_cast<int64_t>(size_of(tensor.wire)));
    }
  }
}

std::string flaw_of(const UnitSpec& spec) {
  // All who submit one of these must mean the same.
  const bool join = spec.kind == OpKind::kJoin;
  const bool adoption = spec.kind == OpKind::kAdoptProcessSet;
  if (join || adoption) {
    Operation plain;
    plain.kind = spec.kind;
    if (plain != spec || spec.process_set != 0 || !spec.tensors.empty()) return "it takes no such arguments";
    if (spec.name != (join ? std::string(kJoinName) : adoption_name(spec.ranks))) return "its name is not its own";
  } else if (spec.name == kJoinName || spec.name.starts_with(kAdoptionPrefix)) {
    return "a reserved name";
  }
  const bool open = has_extents(spec.kind);
  for (const TensorSpec& tensor : spec.tensors) {
    if (tensor.shape.empty() && (open || spec.kind == OpKind::kReduceScatter)) return "a tensor without dimensions";
    auto bytes = widest(tensor);
    for (size_t i = 0; i < tensor.shape.size(); ++i) {
      const int64_t dim = tensor.shape[i];
      if (open && i == 0 ? dim != -1 : dim < 0) return "shape " + to_string(tensor.shape);
      // Nobody downstream has to fear that numel() or a byte count overflows.
      if (dim >= 0 && __builtin_mul_overflow(bytes, dim, &bytes)) return "a tensor too large for any memory";
    }
  }
  return {};
}

std::string flaw_of(const UnitSpec& spec, const std::vector<int64_t>& extents, size_t members) {
  const size_t needed = extents_per_rank(spec, members);
  if (extents.size() != needed) {
    return std::to_string(extents.size()) + (spec.kind == OpKind::kAlltoall ? " splits" : " extents") + " for " +
           std::to_string(spec.tensors.size()) + (spec.tensors.size() == 1 ? " tensor" : " tensors") + " and " +
           std::to_string(members) + (members == 1 ? " member" : " members") + " (needed: " + std::to_string(needed) +
           ")";
  }
  for (const int64_t extent : extents) {
    if (extent < 0) return "a negative number of rows (" + std::to_string(extent) + ")";
  }
  return {};
}

std::optional<int64_t> payload(const UnitSpec& spec, const std::vector<int64_t>& extents, size_t members) {
  const size_t per_tensor = extents_per_rank(spec, members) / std::max<size_t>(spec.tensors.size(), 1);
  int64_t total = 0;
  for (size_t t = 0; t < spec.tensors.size(); ++t) {
    const TensorSpec& tensor = spec.tensors[t];
    int64_t rows = 0;
    for (size_t member = 0; member < members; ++member) {
      const int64_t* own = extents.data() + (member * spec.tensors.size() + t) * per_tensor;
      for (size_t i = 0; i < per_tensor; ++i) {
        if (__builtin_add_overflow(rows, own[i], &rows)) return std::nullopt;
      }
    }
    int64_t bytes = widest(tensor);
    for (size_t d = 1; d < tensor.shape.size(); ++d) bytes *= tensor.shape[d];
    if (__builtin_mul_overflow(rows, bytes, &bytes)) return std::nullopt;
    if (__builtin_add_overflow(total, bytes, &total)) return std::nullopt;
  }
  return spec.kind == OpKind::kAlltoall ? total / static_cast<int64_t>(members) : total;
}

bool agree(const UnitSpec& a, const UnitSpec& b) {
  return a.kind == b.kind && a.op == b.op && same(a.prescale, b.prescale) && same(a.postscale, b.postscale) &&
         a.root == b.root && a.process_set == b.process_set && a.tensors == b.tensors && a.ranks == b.ranks &&
         a.name == b.name;
}

Unit& UnitTable::find_or_create(uint32_t set, const std::string& name) {
  Unit& unit = sets_[set][name];
  unit.set_id = set;
  return unit;
}

void UnitTable::erase(Unit* unit) {
  const auto units = sets_.find(unit->set_id);
  units->second.erase(units->second.find(unit->name()));
  if (units->second.empty() && units->first != 0) sets_.erase(units);
}

std::vector<Unit*> UnitTable::in_set(uint32_t set) {
  std::vector<Unit*> result;
  if (const auto units = sets_.find(set); units != sets_.end()) {
    for (auto& [name, unit] : units->second) result.push_back(&unit);
  }
  return result;
}

}  // namespace fusewire
