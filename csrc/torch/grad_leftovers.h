// Gradients on a GPU that should have been reset, and were not.
#pragma once

#include <ATen/core/Tensor.h>

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "torch/gpu.h"

namespace fusewire {

// Note [Leftovers]
// Whether a reduced gradient was reset before the next backward adds to it can be told from its values alone: zero_()
// may go by .data, which leaves no trace. On a CPU they are looked at there and then. To look at those on a GPU, the
// host would have to wait for it, once per parameter. So they are looked at by the GPU, the answers come with the end
// of the window, and who has forgotten to reset is told in a later one.
class Leftovers {
 public:
  Leftovers() = default;
  Leftovers(const Leftovers&) = delete;
  Leftovers& operator=(const Leftovers&) = delete;
  ~Leftovers();

  // On the current stream, before anything is added to `gradient`.
  void look(const std::string& name, const at::Tensor& gradient);

  // At the end of a window: sends for the answers. Returns the name of a parameter that had something left in an
  // earlier window, "" where none is known. Never waits.
  std::string collect(const gpu::Gpu& gpu);

 private:
  struct Answers {
    const gpu::Gpu* gpu = nullptr;
    std::vector<std::string> names{};
    void* pinned = nullptr;  // a bool for each
    SharedEvent there{};
  };
  static void give_back(const Answers& answers);

  std::vector<std::pair<std::string, at::Tensor>> asked_;
  std::deque<Answers> answers_;
};

}  // namespace fusewire
