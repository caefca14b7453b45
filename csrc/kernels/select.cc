// Picks the table for this machine.
#include "kernels/kernels.h"
#include "kernels/reference.h"

namespace fusewire {
namespace element {
namespace sse2 {
extern const CpuKernels kKernels;
}
namespace avx2 {
extern const CpuKernels kKernels;
}
namespace avx512 {
extern const CpuKernels kKernels;
}
namespace neon {
extern const CpuKernels kKernels;
}
}  // namespace element

std::vector<const CpuKernels*> available_cpu_kernels() {
  std::vector<const CpuKernels*> tables = {&kReferenceKernels};
#ifdef FUSEWIRE_X86
  __builtin_cpu_init();
  tables.push_back(&element::sse2::kKernels);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c")) tables.push_back(&element::avx2::kKernels);
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("f16c")) {
    tables.push_back(&element::avx512::kKernels);
  }
#endif
#ifdef FUSEWIRE_NEON
  tables.push_back(&element::neon::kKernels);
#endif
  return tables;
}

const CpuKernels& cpu_kernels() {
  static const CpuKernels& best = *available_cpu_kernels().back();
  return best;
}

}  // namespace fusewire
