#include "control/rank_set.h"

namespace fusewire {

std::string rank_list(const std::vector<int>& ranks) {
  constexpr size_t kMaxPieces = 12;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  size_t pieces = 0;
  for (size_t i = 0; i < ranks.size();) {
    if (pieces == kMaxPieces) return text + " and " + std::to_string(ranks.size() - i) + " more";
    size_t end = i + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (end - i < 3) end = i + 1;  // "1, 2" reads better than "1-2"
    if (pieces++ > 0) text += ", ";
    text += std::to_string(ranks[i]);
    if (end - i > 1) text.append("-").append(std::to_string(ranks[end - 1]));
    i = end;
  }
  return text;
}

}  // namespace fusewire
