#include "control/mismatch.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <functional>
#include <utility>
#include <vector>

namespace fusewire {
namespace {

// One opinion and the ranks that hold it.
using Opinions = std::vector<std::pair<const UnitSpec*, std::vector<int>>>;
using Reader = std::function<std::string(const UnitSpec&)>;

std::string to_text(double value) {
  std::array<char, 32> text;
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value).ptr;
  return {text.data(), end};
}

Opinions opinions_of(const Unit& unit) {
  RankSet agreeing = unit.submitted;
  Opinions opinions;
  for (const Unit::Dissent& dissent : unit.dissents) {
    opinions.emplace_back(&dissent.description->spec, dissent.ranks);
    for (const int rank : dissent.ranks) agreeing.erase(rank);
  }
  std::vector<int> ranks;
  for (const int rank : unit.set->ranks) {  // those who adopt a set are members of this one
    if (agreeing.contains(rank)) ranks.push_back(rank);
  }
  opinions.emplace_back(&unit.proposed->spec, std::move(ranks));
  return opinions;
}

// "rank 0 has 1, ranks 1, 2 have 2", or empty when all hold the same value.
std::string differing(const Opinions& opinions, const Reader& read) {
  std::vector<std::pair<std::string, std::vector<int>>> values;
  for (const auto& [spec, ranks] : opinions) {
    std::string value = read(*spec);
    auto known = std::find_if(values.begin(), values.end(), [&](const auto& v) { return v.first == value; });
    if (known == values.end()) known = values.insert(values.end(), {std::move(value), {}});
    known->second.insert(known->second.end(), ranks.begin(), ranks.end());
  }
  if (values.size() < 2) return {};
  for (auto& [value, ranks] : values) std::sort(ranks.begin(), ranks.end());
  std::sort(values.begin(), values.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  std::string text;
  for (const auto& [value, ranks] : values) {
    if (!text.empty()) text += ", ";
    text += rank_list(ranks) + (ranks.size() == 1 ? " has " : " have ") + value;
  }
  return text;
}

}  // namespace

std::string describe_unit(const UnitSpec& spec) {
  if (spec.kind == OpKind::kJoin || spec.kind == OpKind::kAdoptProcessSet) return spec.name;
  std::string text = std::string(to_string(spec.kind)) + " '" + spec.name + "'";
  const uint32_t set = negotiated_in(spec);
  return set == 0 ? text : text + " in process set " + std::to_string(set);
}

std::string describe_mismatch(const Unit& unit) {
  const Opinions opinions = opinions_of(unit);
  const UnitSpec& reference = unit.proposed->spec;
  const auto sentence = [](const std::string& what, const std::string& field, const std::string& values) {
    return what + ": " + field + " differs: " + values + "; what has one name must be the same on all ranks";
  };

  const std::array<std::pair<const char*, Reader>, 7> fields = {{
      {"op", [](const UnitSpec& s) { return std::string(to_string(s.op)); }},
      {"root", [](const UnitSpec& s) { return std::to_string(s.root); }},
      {"prescale factor", [](const UnitSpec& s) { return to_text(s.prescale); }},
      {"postscale factor", [](const UnitSpec& s) { return to_text(s.postscale); }},
      {"process set to remove", [](const UnitSpec& s) { return std::to_string(s.process_set); }},
      {"list of ranks", [](const UnitSpec& s) { return to_string(Dims(s.ranks.begin(), s.ranks.end())); }},
      {"number of tensors", [](const UnitSpec& s) { return std::to_string(s.tensors.size()); }},
  }};
  const std::string kinds = differing(opinions, [](const UnitSpec& s) { return std::string(to_string(s.kind)); });
  if (!kinds.empty()) return sentence("'" + reference.name + "'", "operation", kinds);
  for (const auto& [field, read] : fields) {
    const std::string values = differing(opinions, read);
    if (!values.empty()) return sentence(describe_unit(reference), field, values);
  }

  using TensorReader = std::string (*)(const TensorSpec&);
  const std::array<std::pair<const char*, TensorReader>, 4> tensor_fields = {{
      {"dtype", [](const TensorSpec& t) { return std::string(to_string(t.dtype)); }},
      {"shape", [](const TensorSpec& t) { return to_string(t.shape); }},
      {"device", [](const TensorSpec& t) { return std::string(to_string(t.device)); }},
      {"compressed dtype", [](const TensorSpec& t) { return std::string(to_string(t.wire)); }},
  }};
  for (size_t i = 0; i < reference.tensors.size(); ++i) {
    for (const auto& [field, read] : tensor_fields) {
      const std::string values =
          differing(opinions, [i, read = read](const UnitSpec& s) { return read(s.tensors[i]); });
      if (values.empty()) continue;
      std::string what = describe_unit(reference);
      if (reference.tensors.size() > 1) {
        what += " (tensor " + std::to_string(i) + " of " + std::to_string(reference.tensors.size()) + ")";
      }
      return sentence(what, field, values);
    }
  }
  return describe_unit(reference) + ": the ranks disagree";
}

}  // namespace fusewire
