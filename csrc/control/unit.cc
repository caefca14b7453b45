#include "control/unit.h"

#include <limits>
#include <utility>

namespace fusewire {
namespace {

bool same(double a, double b) { return a == b || (a != a && b != b); }

int64_t saturating_add(int64_t a, int64_t b) {
  int64_t sum = 0;
  return __builtin_add_overflow(a, b, &sum) ? std::numeric_limits<int64_t>::max() : sum;
}

}  // namespace

Description::Description(UnitSpec unit) : spec(std::move(unit)) {
  cacheable = !changes_sets(spec.kind) && spec.name.find(kUnnamedMark) == std::string::npos;
  static_cast<Operation&>(key) = spec;
  fusible = moves_data(spec.kind) && !spec.tensors.empty();
  if (!fusible) return;
  key.dtype = spec.tensors.front().dtype;
  key.wire = spec.tensors.front().wire;
  key.device = spec.tensors.front().device;
  for (const TensorSpec& tensor : spec.tensors) {
    if (tensor.dtype != key.dtype || tensor.wire != key.wire || tensor.device != key.device) fusible = false;
    bytes = saturating_add(bytes, numel(tensor.shape) * static_cast<int64_t>(size_of(tensor.wire)));
  }
}

bool agree(const UnitSpec& a, const UnitSpec& b) {
  return a.kind == b.kind && a.op == b.op && same(a.prescale, b.prescale) && same(a.postscale, b.postscale) &&
         a.root == b.root && a.process_set == b.process_set && a.tensors == b.tensors && a.ranks == b.ranks &&
         a.name == b.name;
}

Unit* UnitTable::find(uint32_t set, std::string_view name) {
  const auto units = sets_.find(set);
  if (units == sets_.end()) return nullptr;
  const auto unit = units->second.find(name);
  return unit == units->second.end() ? nullptr : &unit->second;
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
