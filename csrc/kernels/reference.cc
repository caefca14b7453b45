// The plain path: element.h in a loop. Every other table must give the same bits; it also serves machines that have no
// table of their own.
#include "kernels/reference.h"

#include <cstring>

#include "kernels/adasum.h"
#include "kernels/dispatch.h"

namespace fusewire {
namespace {

using namespace element;

void copy(void* destination, const void* source, size_t bytes) {
  if (bytes > 0) std::memcpy(destination, source, bytes);
}

void cast(DataType from, const void* source, DataType to, void* destination, size_t count, double factor) {
  visit_floating(from, [&](auto from_tag) {
    visit_floating(to, [&](auto to_tag) {
      using From = typename decltype(from_tag)::Type;
      using To = typename decltype(to_tag)::Type;
      for (size_t i = 0; i < count; ++i) store(destination, i, cast_element<From, To>(load<From>(source, i), factor));
    });
  });
}

void reduce(const ReduceArgs& args) {
  reduce_plainly(args, 0, args.count);
  if (args.second != nullptr) copy(args.second, args.destination, args.count * size_of(args.dtype));
}

void dots(const DotArgs& args) {
  visit_floating(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    for (int i = 0; i < args.source_count; ++i) {
      for (int j = i; j < args.source_count; ++j) {
        double lanes[kDotLanes] = {};
        add_products<T>(args.sources[i], args.scales[i], args.sources[j], args.scales[j], 0, args.count, lanes);
        args.dots[pair_index(args.source_count, i, j)] = fold_lanes(lanes);
      }
    }
  });
}

void combine(const CombineArgs& args) {
  combine_plainly(args, 0, args.count);
  if (args.second != nullptr) copy(args.second, args.destination, args.count * size_of(args.dtype));
}

}  // namespace

void combine_plainly(const CombineArgs& args, size_t begin, size_t end) {
  visit_floating(args.dtype, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    for (size_t i = begin; i < end; ++i) {
      store(args.destination, i,
            combine_element<T>(args.sources, args.scales, args.coefficients, args.source_count, i, args.factor));
    }
  });
}

void reduce_plainly(const ReduceArgs& args, size_t begin, size_t end) {
  visit_type(args.dtype, [&](auto type_tag, size_t per_element) {
    visit_op(args.op, [&](auto op_tag) {
      using T = typename decltype(type_tag)::Type;
      constexpr Combine kOp = decltype(op_tag)::kCombine;
      for (size_t i = begin * per_element; i < end * per_element; ++i) {
        const ReadAt<T> read{args.sources, i};
        store(args.destination, i,
              reduce_element<T, kOp>(read, args.source_count, args.scale.factor, args.scale.divisor));
      }
    });
  });
}

const CpuKernels kReferenceKernels = {"reference", copy, cast, reduce, dots, combine};

}  // namespace fusewire
