// The kernels as loops (simt/plain_kernels.h) give the bits that the kernels as fibers give: what is tested with the
// one under ThreadSanitizer holds for the other.
#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <vector>

#include "kernels/device_plan.h"
#include "kernels_data.h"
#include "kernels_views.h"
#include "simt/plain_kernels.h"
#include "simt/stand_in.h"

namespace fusewire::testing {
namespace {

const CudaKernels* const kBoth[] = {&kCudaKernels, &kPlainKernels};

// Runs `kernel` of both tables on `args` and expects the same answer, one launch or none.
template <class Args, class MakeArgs>
void run_both(int (*CudaKernels::*kernel)(const Args&), const MakeArgs& make_args, Random& random) {
  int answers[2];
  uint64_t launches[2];
  for (int which = 0; which < 2; ++which) {
    simt::seed(random.bits());
    const Args args = make_args(which);
    const uint64_t before = simt::launches();
    answers[which] = (kBoth[which]->*kernel)(args);
    launches[which] = simt::launches() - before;
  }
  EXPECT_EQ(answers[0], answers[1]);
  EXPECT_EQ(launches[0], launches[1]);
}

std::vector<Buffer> twice(const Buffer& buffer) { return {buffer, buffer}; }

bool same(DataType type, const Buffer& a, const Buffer& b) {
  return first_difference(type, a.data(), b.data(), a.size() / size_of(type)) < 0;
}

// A batch of tensors of all layouts and an absent one, to or from a buffer.
void transfer(DataType dtype, DataType wire, double factor, int64_t divisor, bool packs, Flavour flavour,
              Random& random) {
  std::vector<TensorView> views;
  std::vector<Buffer> memory;
  for (int i = 0; i < 5; ++i) {
    views.push_back(i == 2 ? contiguous_view(nullptr, dtype, {37}) : random_view(random, dtype));
    if (i == 4) views.back() = contiguous_view(nullptr, dtype, {5000});
    const size_t elements = i == 2 ? 0 : static_cast<size_t>(i == 4 ? 5000 : extent(views.back()));
    memory.emplace_back(elements * size_of(dtype), i % 2 * size_of(dtype));
    random.fill(dtype, flavour, memory.back().data(), elements);
  }
  std::vector<std::vector<Buffer>> tensors;
  for (const Buffer& one : memory) tensors.push_back(twice(one));
  size_t bytes = 0;
  std::vector<size_t> offsets;
  for (size_t i = 0; i < views.size(); ++i) {
    offsets.push_back(bytes);
    bytes += static_cast<size_t>(views[i].numel()) * size_of(wire);
    if (i != 1) bytes = (bytes + 15) / 16 * 16;
  }
  Buffer filled(bytes, 0);
  random.fill(wire, flavour, filled.data(), bytes / size_of(wire));
  std::vector<Buffer> buffers = twice(filled);
  std::vector<Buffer> tables;
  tables.reserve(2);
  run_both(
      packs ? &CudaKernels::pack : &CudaKernels::unpack,
      [&](int which) {
        TransferPlan plan(dtype, wire);
        for (size_t i = 0; i < views.size(); ++i) {
          if (i != 2) views[i].data = tensors[i][static_cast<size_t>(which)].data();
          plan.add(views[i], 0, views[i].numel(), offsets[i]);
        }
        tables.emplace_back(plan.table_bytes(), 0);
        plan.write(tables.back().data());
        TransferArgs args = plan.args(tables.back().data());
        args.buffer = buffers[static_cast<size_t>(which)].data();
        args.factor = factor;
        args.divisor = divisor;
        args.identity = 0x5511;
        return args;
      },
      random);
  const std::string what = std::string(to_string(dtype)) + "/" + std::string(to_string(wire)) + " factor " +
                           std::to_string(factor) + " divisor " + std::to_string(divisor);
  EXPECT_TRUE(same(wire, buffers[0], buffers[1])) << what;
  for (const std::vector<Buffer>& tensor : tensors) EXPECT_TRUE(same(dtype, tensor[0], tensor[1])) << what;
  EXPECT_TRUE(buffers[0].guards_intact() && buffers[1].guards_intact());
}

TEST(PlainKernels, PackAndUnpack) {
  Random random(1);
  for (const DataType dtype : all_types()) {
    for (const DataType wire : all_types()) {
      const bool narrows = is_floating(dtype) && is_floating(wire) && size_of(wire) < size_of(dtype);
      if (wire != dtype && !narrows) continue;
      for (const Flavour flavour : kFlavours) {
        transfer(dtype, wire, 1.0, 1, true, flavour, random);
        transfer(dtype, wire, 1.0, 1, false, flavour, random);
        transfer(dtype, wire, 1.0 / 3, 1, true, flavour, random);
        transfer(dtype, wire, -0.5, 3, false, flavour, random);
        transfer(dtype, wire, 1.0, 4, false, flavour, random);
      }
    }
  }
}

TEST(PlainKernels, Reduce) {
  Random random(2);
  for (const DataType dtype : all_types()) {
    for (const ReduceOp op : kOps) {
      for (const Flavour flavour : kFlavours) {
        constexpr size_t kElements = 3001;
        std::vector<Buffer> sources;
        for (size_t s = 0; s < 3; ++s) {
          sources.emplace_back(kElements * size_of(dtype), s == 2 && op == ReduceOp::kMin ? size_of(dtype) : 0);
          random.fill(dtype, flavour, sources.back().data(), kElements);
        }
        std::vector<Buffer> results = twice(Buffer(kElements * size_of(dtype), 0));
        run_both(
            &CudaKernels::reduce,
            [&](int which) {
              DeviceReduceArgs args;
              for (size_t s = 0; s < sources.size(); ++s) args.sources[s] = sources[s].data();
              args.source_count = 3;
              args.destination = results[static_cast<size_t>(which)].data();
              args.count = kElements;
              args.dtype = dtype;
              args.op = op;
              args.factor = flavour == Flavour::kTiny ? 1.0 : 0.7;
              args.divisor = op == ReduceOp::kAverage ? 3 : 1;
              return args;
            },
            random);
        EXPECT_TRUE(same(dtype, results[0], results[1])) << to_string(dtype) << " " << to_string(op);
      }
    }
  }
}

// Spans within a block, over several, empty, and over more blocks than a block has threads.
TEST(PlainKernels, DotAndCombine) {
  Random random(3);
  for (const DataType dtype : kFloatingTypes) {
    const uint64_t tile = 16384 / size_of(dtype);
    for (const int source_count : {2, 3, 4}) {
      for (const bool align : {true, false}) {
        SpanPlan plan(dtype);
        uint64_t elements = 0;
        const uint64_t many = source_count == 2 && align && dtype == DataType::kFloat64 ? 2100 * tile : 1;
        for (const uint64_t count : {uint64_t{1}, uint64_t{7}, uint64_t{0}, tile, tile + 1, 30 * tile + 5, many}) {
          plan.add(elements, count);
          elements += align ? (count + 7) / 8 * 8 : count;
        }
        Buffer table(plan.table_bytes(), 0);
        plan.write(table.data());
        std::vector<Buffer> sources;
        for (int s = 0; s < source_count; ++s) {
          sources.emplace_back(elements * size_of(dtype), align ? 0 : size_of(dtype));
          random.fill(dtype, Flavour::kOrdinary, sources.back().data(), elements);
        }
        const auto pairs = static_cast<size_t>(source_count * (source_count + 1) / 2);
        std::vector<std::vector<double>> dots(2, std::vector<double>(plan.spans() * pairs, -1.0));
        std::vector<double> partials(plan.slots() * pairs);
        std::vector<uint32_t> arrivals(plan.spans());
        run_both(
            &CudaKernels::dot,
            [&](int which) {
              DeviceDotArgs args = plan.dot_args(table.data());
              for (size_t s = 0; s < sources.size(); ++s) args.sources[s] = sources[s].data();
              args.source_count = source_count;
              args.dots = dots[static_cast<size_t>(which)].data();
              args.partials = partials.data();
              args.arrivals = arrivals.data();
              return args;
            },
            random);
        EXPECT_EQ(dots[0], dots[1]) << to_string(dtype);

        const std::vector<double> coefficients(plan.spans() * static_cast<size_t>(source_count), 0.3);
        std::vector<Buffer> results = twice(Buffer(elements * size_of(dtype), 0));
        run_both(
            &CudaKernels::combine,
            [&](int which) {
              DeviceCombineArgs args = plan.combine_args(table.data());
              for (size_t s = 0; s < sources.size(); ++s) args.sources[s] = sources[s].data();
              args.source_count = source_count;
              args.dots = source_count == 2 ? dots[0].data() : nullptr;
              args.coefficients = source_count == 2 ? nullptr : coefficients.data();
              args.destination = results[static_cast<size_t>(which)].data();
              args.factor = 1.7;
              return args;
            },
            random);
        EXPECT_TRUE(same(dtype, results[0], results[1])) << to_string(dtype);
      }
    }
  }
}

TEST(PlainKernels, QuantiseAndDequantise) {
  Random random(4);
  constexpr size_t kElements = 1000;
  constexpr size_t kBlock = 256;
  for (const DataType dtype : kFloatingTypes) {
    const DataType wide = dtype == DataType::kFloat64 ? DataType::kFloat64 : DataType::kFloat32;
    Buffer values(kElements * size_of(dtype), 0);
    random.fill(dtype, Flavour::kOrdinary, values.data(), kElements);
    Buffer error(kElements * size_of(wide), 0);
    random.fill(wide, Flavour::kOrdinary, error.data(), kElements);
    std::vector<Buffer> errors = twice(error);
    std::vector<std::vector<int8_t>> quantised(2, std::vector<int8_t>(4 * kBlock, 1));
    std::vector<std::vector<float>> scales(2, std::vector<float>(4));
    run_both(
        &CudaKernels::quantise,
        [&](int w) {
          const auto which = static_cast<size_t>(w);
          DeviceQuantiseArgs args;
          args.values = values.data();
          args.dtype = dtype;
          args.count = kElements;
          args.block = kBlock;
          args.error_in = args.error_out = errors[which].data();
          args.quantised = quantised[which].data();
          args.scales = scales[which].data();
          return args;
        },
        random);
    EXPECT_EQ(quantised[0], quantised[1]);
    EXPECT_EQ(scales[0], scales[1]);
    EXPECT_TRUE(same(wide, errors[0], errors[1]));
    std::vector<Buffer> totals = twice(error);
    for (const bool overwrite : {true, false}) {
      run_both(
          &CudaKernels::dequantise,
          [&](int which) {
            DeviceDequantiseArgs args;
            args.quantised = quantised[0].data();
            args.scales = scales[0].data();
            args.payloads = 1;
            args.count = kElements;
            args.block = kBlock;
            args.total = totals[static_cast<size_t>(which)].data();
            args.dtype = wide;
            args.overwrite = overwrite;
            args.factor = 0.3;
            return args;
          },
          random);
      EXPECT_TRUE(same(wide, totals[0], totals[1]));
    }
  }
}

}  // namespace
}  // namespace fusewire::testing
