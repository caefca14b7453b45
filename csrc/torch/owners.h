// Which reducer owns which parameter, in this process. A parameter has one owner, the newest.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <memory>

namespace fusewire {

class GradReducer;

class Owners {
 public:
  // `reducer` owns `parameter` from now on, as its slot `slot`; the former owner lets go of it. Call without locks.
  static void take(const at::Tensor& parameter, const std::shared_ptr<GradReducer>& reducer, size_t slot);

  // Nobody owns it, unless somebody else has taken it meanwhile.
  static void drop(const at::Tensor& parameter, const GradReducer* reducer);
};

}  // namespace fusewire
