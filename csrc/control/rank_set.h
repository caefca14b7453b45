// A set of ranks as bits, and how lists of ranks read in messages.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace fusewire {

class RankSet {
 public:
  RankSet() = default;
  explicit RankSet(int size) : words_((static_cast<size_t>(size) + 63) / 64) {}

  bool contains(int rank) const { return (words_[word(rank)] >> (rank & 63)) & 1; }
  void insert(int rank) { words_[word(rank)] |= uint64_t{1} << (rank & 63); }
  void erase(int rank) { words_[word(rank)] &= ~(uint64_t{1} << (rank & 63)); }
  void reset(int size) { words_.assign((static_cast<size_t>(size) + 63) / 64, 0); }  // empty, for ranks below `size`

  bool empty() const {
    for (const uint64_t w : words_) {
      if (w != 0) return false;
    }
    return true;
  }
  int count() const {
    int n = 0;
    for (const uint64_t w : words_) n += std::popcount(w);
    return n;
  }
  int count_common(const RankSet& other) const {
    int n = 0;
    for (size_t i = 0; i < words_.size() && i < other.words_.size(); ++i)
      n += std::popcount(words_[i] & other.words_[i]);
    return n;
  }
  // A rank that both sets hold, -1 when there is none.
  int first_common(const RankSet& other) const {
    for (size_t i = 0; i < words_.size() && i < other.words_.size(); ++i) {
      if (const uint64_t both = words_[i] & other.words_[i]) return static_cast<int>(i * 64) + std::countr_zero(both);
    }
    return -1;
  }

 private:
  static size_t word(int rank) { return static_cast<size_t>(rank) / 64; }
  std::vector<uint64_t> words_;
};

// "rank 3", "ranks 0, 2", "ranks 0-5, 9"; long lists are cut ("ranks 0, 2, 4 and 37 more"). Ascending ranks.
std::string rank_list(const std::vector<int>& ranks);

}  // namespace fusewire
