// Events and memory of a GPU as an engine uses it.
#include "collective/gpu_device.h"

#include <gtest/gtest.h>

#include <cstring>

#include "collective/gpu_transfer.h"
#include "simt/cuda_double.h"

namespace fusewire::testing {
namespace {

struct Gpu {
  explicit Gpu(uint64_t seed = 1)
      : cuda(std::make_shared<CudaDouble>(seed)), device(std::make_shared<GpuDevice>(cuda, 0, cuda->create_stream())) {}
  ~Gpu() {
    cuda->drain();
    device.reset();
    EXPECT_EQ(cuda->mistakes(), std::vector<std::string>());
  }

  std::shared_ptr<CudaDouble> cuda;
  std::shared_ptr<GpuDevice> device;
};

TEST(GpuDevice, EventsAreUsedAgainOnceNobodyHasThem) {
  Gpu gpu;
  SharedEvent first = gpu.device->mark();
  const CudaApi::Event event = first->get();
  SharedEvent second = gpu.device->mark();
  EXPECT_NE(second->get(), event);
  first.reset();
  EXPECT_EQ(gpu.device->mark()->get(), event);
  EXPECT_NE(gpu.device->mark(gpu.device->stream(), true)->get(), event);  // one with a clock is another kind
}

TEST(GpuDevice, MemoryIsLentAgainOnlyWhenItsWorkIsDone) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    Gpu gpu(seed);
    bool gate = false;
    GpuLoan held(*gpu.device, GpuMemory::kDevice, 100);
    void* const memory = held.get();
    gpu.cuda->launch("slow work", gpu.device->stream(), {{memory, 100, true}}, [&gate] { gate = true; });
    held = GpuLoan();
    const GpuLoan next(*gpu.device, GpuMemory::kDevice, 100);
    EXPECT_TRUE(next.get() != memory || gate);
    gpu.cuda->drain();
    const GpuLoan after(*gpu.device, GpuMemory::kDevice, 100);
    EXPECT_TRUE(next.get() == memory || after.get() == memory);
  }
}

TEST(GpuDevice, LoansAreAtLeastAsLargeAsAskedForAndNotMuchLarger) {
  Gpu gpu;
  for (const size_t bytes : {size_t{1}, size_t{4096}, size_t{5000}, (size_t{1} << 20) + 1, size_t{11} << 20}) {
    for (const GpuMemory kind : {GpuMemory::kDevice, GpuMemory::kPinned}) {
      const GpuLoan loan(*gpu.device, kind, bytes);
      std::memset(loan.get(), 1, bytes);
      gpu.cuda->host_uses(loan.get(), bytes, true);
    }
  }
}

// The whole way of a bucket, with tables and buffers borrowed over and over.
TEST(GpuTransfer, TensorsGoThereAndBackInAnyOrderOfWork) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Gpu gpu(seed);
    constexpr int64_t kCount = 1000;
    constexpr size_t kBytes = kCount * sizeof(float);
    auto* const values = static_cast<float*>(gpu.cuda->allocate(kBytes));
    const TensorView view = contiguous_view(values, DataType::kFloat32, {kCount});
    const TensorView absent = contiguous_view(nullptr, DataType::kFloat32, {4});
    gpu.cuda->launch("the model", gpu.device->stream(), {{values, kBytes, true}}, [values] {
      for (int64_t i = 0; i < kCount; ++i) values[i] = static_cast<float>(i);
    });
    const std::vector<GpuPiece> pieces = {{&view, 0, kCount, 16}, {&absent, 0, 4, 0}};
    for (int round = 0; round < 3; ++round) {
      const GpuLoan buffer(*gpu.device, GpuMemory::kDevice, kBytes + 16);
      gpu_pack(*gpu.device, pieces, DataType::kFloat32, DataType::kFloat16, buffer.get(), {.factor = 2.0});
      gpu_unpack(*gpu.device, pieces, DataType::kFloat32, DataType::kFloat16, buffer.get(), {.factor = 0.5});
    }
    gpu.device->mark()->synchronize();
    for (int64_t i = 0; i < kCount; ++i) EXPECT_EQ(values[i], static_cast<float>(i));
    gpu.cuda->free(values);
  }
}

}  // namespace
}  // namespace fusewire::testing
