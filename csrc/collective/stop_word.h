// One word of shared memory that ends a collective on all its members.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "common/error.h"

namespace fusewire {

// Note [The abort word]
// 0: all is well. Otherwise code and rank of the error that every rank throws; who comes first decides. The reason in
// words stays with the rank that knows it (the control plane tells it to the others).
class StopWord {
 public:
  explicit StopWord(std::atomic<uint32_t>& word) : word_(&word) {}

  void stop(ErrorCode code, int rank) const noexcept {
    uint32_t none = 0;
    const uint32_t why = (static_cast<uint32_t>(rank + 1) << 8) | (static_cast<uint32_t>(code) + 1);
    word_->compare_exchange_strong(none, why, std::memory_order_seq_cst);
  }

  bool stopped() const { return word_->load(std::memory_order_seq_cst) != 0; }

  void throw_if_stopped(const char* what) const {
    const uint32_t word = word_->load(std::memory_order_acquire);
    if (word == 0) [[likely]]
      return;
    throw Error(static_cast<ErrorCode>((word & 0xff) - 1), std::string(what) + " was stopped",
                static_cast<int>(word >> 8) - 1);
  }

 private:
  std::atomic<uint32_t>* word_;
};

}  // namespace fusewire
