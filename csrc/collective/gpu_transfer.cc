#include "collective/gpu_transfer.h"

namespace fusewire {
namespace {

void transfer(GpuDevice& device, const std::vector<GpuPiece>& pieces, DataType dtype, DataType wire, void* buffer,
              const GpuScale& scale, void (CudaApi::*launch)(const TransferArgs&)) {
  TransferPlan plan(dtype, wire);
  for (const GpuPiece& piece : pieces) plan.add(*piece.view, piece.begin, piece.count, piece.offset);
  if (plan.empty()) return;
  const GpuLoan table = gpu_upload(device, plan.table_bytes(), [&](void* at) { plan.write(at); });
  TransferArgs args = plan.args(table.get());
  args.buffer = buffer;
  args.factor = scale.factor;
  args.divisor = scale.divisor;
  args.identity = scale.identity;
  args.stream = device.stream();
  (device.api().*launch)(args);
}

}  // namespace

void gpu_pack(GpuDevice& device, const std::vector<GpuPiece>& pieces, DataType dtype, DataType wire, void* buffer,
              const GpuScale& scale) {
  transfer(device, pieces, dtype, wire, buffer, scale, &CudaApi::pack);
}

void gpu_unpack(GpuDevice& device, const std::vector<GpuPiece>& pieces, DataType dtype, DataType wire, void* buffer,
                const GpuScale& scale) {
  transfer(device, pieces, dtype, wire, buffer, scale, &CudaApi::unpack);
}

GpuLoan gpu_upload(GpuDevice& device, size_t bytes, const std::function<void(void*)>& write) {
  const GpuLoan pinned(device, GpuMemory::kPinned, bytes);
  GpuLoan there(device, GpuMemory::kDevice, bytes);
  write(pinned.get());
  device.api().copy(there.get(), pinned.get(), bytes, device.stream());
  return there;
}

}  // namespace fusewire
