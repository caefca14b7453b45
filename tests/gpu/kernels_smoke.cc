// Launches every CUDA kernel over a few sizes, types and layouts, and looks at the results: for compute-sanitizer, and
// as the first thing to run where a GPU is. Built with -DFUSEWIRE_GPU_TESTS=ON; exits with 0 if all is well.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "collective/cuda/runtime.h"
#include "collective/gpu_transfer.h"
#include "common/error.h"
#include "kernels/device_plan.h"

namespace fusewire {
namespace {

int failures = 0;

void expect(bool right, const std::string& what) {
  if (right) return;
  ++failures;
  std::printf("FAIL: %s\n", what.c_str());
}

// Numbers in device memory, written and read by way of pinned memory.
class Numbers {
 public:
  Numbers(GpuDevice& device, std::vector<float> values)
      : device_(device), values_(std::move(values)), memory_(device, GpuMemory::kDevice, bytes()) {
    const GpuLoan pinned(device_, GpuMemory::kPinned, bytes());
    std::memcpy(pinned.get(), values_.data(), bytes());
    device_.api().copy(memory_.get(), pinned.get(), bytes(), device_.stream());
  }
  void* data() const { return memory_.get(); }
  size_t bytes() const { return values_.size() * sizeof(float); }
  const std::vector<float>& before() const { return values_; }
  std::vector<float> now() const {
    const GpuLoan pinned(device_, GpuMemory::kPinned, bytes());
    device_.api().copy(pinned.get(), memory_.get(), bytes(), device_.stream());
    device_.mark()->synchronize();
    std::vector<float> result(values_.size());
    std::memcpy(result.data(), pinned.get(), bytes());
    return result;
  }

 private:
  GpuDevice& device_;
  const std::vector<float> values_;
  GpuLoan memory_;
};

std::vector<float> some(size_t count, float step) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = std::sin(step * static_cast<float>(i));
  return values;
}

void transfers(GpuDevice& device, size_t count, DataType wire, bool transposed) {
  const std::string what = "pack and unpack of " + std::to_string(count) + (transposed ? " transposed" : "") +
                           ", wire " + std::string(to_string(wire));
  const auto rows = static_cast<int64_t>(count);
  std::vector<std::unique_ptr<Numbers>> tensors;
  std::vector<TensorView> views;
  for (int t = 0; t < 20; ++t) {
    tensors.push_back(std::make_unique<Numbers>(device, some(count * 3, 0.1F * static_cast<float>(t + 1))));
    views.push_back(contiguous_view(tensors.back()->data(), DataType::kFloat32, {rows, 3}));
    if (transposed) {
      views.back().sizes = {3, rows};
      views.back().strides = {1, 3};
    }
  }
  std::vector<GpuPiece> pieces;
  uint64_t at = 0;
  for (const TensorView& view : views) {
    pieces.push_back({.view = &view, .begin = 0, .count = view.numel(), .offset = at});
    at += (static_cast<uint64_t>(view.numel()) * size_of(wire) + 15) / 16 * 16;
  }
  const GpuLoan buffer(device, GpuMemory::kDevice, at);
  gpu_pack(device, pieces, DataType::kFloat32, wire, buffer.get(), {.factor = 0.5});
  gpu_unpack(device, pieces, DataType::kFloat32, wire, buffer.get(), {.factor = 2.0});
  const float tolerance = wire == DataType::kFloat32 ? 0.0F : 0.01F;
  for (const auto& tensor : tensors) {
    const std::vector<float> now = tensor->now();
    bool right = true;
    for (size_t i = 0; i < now.size(); ++i) right = right && std::fabs(now[i] - tensor->before()[i]) <= tolerance;
    expect(right, what);
  }
}

void reductions(GpuDevice& device, size_t count) {
  const Numbers a(device, some(count, 0.1F));
  const Numbers b(device, some(count, 0.2F));
  const Numbers c(device, some(count, 0.3F));
  DeviceReduceArgs args;
  args.sources[0] = a.data();
  args.sources[1] = b.data();
  args.sources[2] = c.data();
  args.source_count = 3;
  args.destination = a.data();
  args.count = count;
  args.stream = device.stream();
  device.api().reduce(args);
  const std::vector<float> now = a.now();
  bool right = true;
  for (size_t i = 0; i < count; ++i) {
    const double sum = static_cast<double>(a.before()[i]) + static_cast<double>(b.before()[i]) + c.before()[i];
    right = right && std::fabs(now[i] - sum) < 1e-6;
  }
  expect(right, "reduce of " + std::to_string(count));
}

void adasum(GpuDevice& device, const std::vector<uint64_t>& counts) {
  SpanPlan plan(DataType::kFloat32);
  uint64_t elements = 0;
  for (const uint64_t count : counts) {
    plan.add(elements, count);
    elements += count;
  }
  const Numbers a(device, some(elements, 0.1F));
  const Numbers b(device, some(elements, 0.2F));
  const GpuLoan table = gpu_upload(device, plan.table_bytes(), [&](void* at) { plan.write(at); });
  const GpuLoan dots(device, GpuMemory::kDevice, counts.size() * 3 * sizeof(double));
  const GpuLoan partials(device, GpuMemory::kDevice, plan.slots() * size_t{3} * sizeof(double));
  const GpuLoan arrivals(device, GpuMemory::kDevice, counts.size() * sizeof(uint32_t));
  device.api().fill(arrivals.get(), 0, counts.size() * sizeof(uint32_t), device.stream());
  DeviceDotArgs dot = plan.dot_args(table.get());
  dot.sources[0] = a.data();
  dot.sources[1] = b.data();
  dot.source_count = 2;
  dot.dots = static_cast<double*>(dots.get());
  dot.partials = static_cast<double*>(partials.get());
  dot.arrivals = static_cast<uint32_t*>(arrivals.get());
  dot.stream = device.stream();
  device.api().dot(dot);
  device.api().dot(dot);
  DeviceCombineArgs combine = plan.combine_args(table.get());
  combine.sources[0] = a.data();
  combine.sources[1] = b.data();
  combine.source_count = 2;
  combine.dots = dot.dots;
  combine.destination = a.data();
  combine.stream = device.stream();
  device.api().combine(combine);
  const std::vector<float> now = a.now();
  uint64_t begin = 0;
  for (const uint64_t count : counts) {
    double aa = 0, ab = 0, bb = 0;
    for (uint64_t i = begin; i < begin + count; ++i) {
      const double x = a.before()[i];
      const double y = b.before()[i];
      aa += x * x;
      ab += x * y;
      bb += y * y;
    }
    bool right = true;
    for (uint64_t i = begin; i < begin + count; ++i) {
      const double expected =
          (aa == 0 ? 1 : 1 - ab / (2 * aa)) * a.before()[i] + (bb == 0 ? 1 : 1 - ab / (2 * bb)) * b.before()[i];
      right = right && std::fabs(now[i] - expected) < 1e-5;
    }
    expect(right, "Adasum of a span of " + std::to_string(count));
    begin += count;
  }
}

void int8(GpuDevice& device, size_t count) {
  constexpr uint32_t kBlock = 256;
  const size_t blocks = (count + kBlock - 1) / kBlock;
  const Numbers values(device, some(count, 0.1F));
  const Numbers total(device, std::vector<float>(count));
  const Numbers error(device, std::vector<float>(count));
  const GpuLoan quantised(device, GpuMemory::kDevice, blocks * kBlock);
  const GpuLoan scales(device, GpuMemory::kDevice, blocks * sizeof(float));
  DeviceQuantiseArgs there;
  there.values = values.data();
  there.count = count;
  there.block = kBlock;
  there.error_in = error.data();
  there.error_out = error.data();
  there.quantised = static_cast<int8_t*>(quantised.get());
  there.scales = static_cast<float*>(scales.get());
  there.stream = device.stream();
  device.api().quantise(there);
  DeviceDequantiseArgs back;
  back.quantised = there.quantised;
  back.scales = there.scales;
  back.block = kBlock;
  back.count = count;
  back.total = total.data();
  back.overwrite = true;
  back.stream = device.stream();
  device.api().dequantise(back);
  const std::vector<float> now = total.now();
  const std::vector<float> lost = error.now();
  bool right = true;
  for (size_t i = 0; i < count; ++i) right = right && std::fabs(now[i] + lost[i] - values.before()[i]) < 1e-5;
  expect(right, "int8 of " + std::to_string(count));
}

void run() {
  const std::shared_ptr<CudaApi> api = make_cuda_runtime(0, kCudaKernels);
  const CudaApi::Stream stream = api->create_stream();
  {
    GpuDevice device(api, 0, stream);
    for (const size_t count : {size_t{1}, size_t{85}, size_t{2731}, size_t{50'000}}) {
      for (const DataType wire : {DataType::kFloat32, DataType::kFloat16, DataType::kBFloat16}) {
        transfers(device, count, wire, false);
        transfers(device, count, wire, true);
      }
      reductions(device, count);
      int8(device, count);
    }
    adasum(device, {1});
    adasum(device, {5, 4096, 4097, 33, 200'000, 8});
    device.mark()->synchronize();
  }
  api->destroy_stream(stream);
}

}  // namespace
}  // namespace fusewire

int main() {
  try {
    fusewire::run();
  } catch (const fusewire::Error& error) {
    std::printf("FAIL: %s\n", error.what());
    return 1;
  }
  std::printf("%d failures\n", fusewire::failures);
  return fusewire::failures == 0 ? 0 : 1;
}
