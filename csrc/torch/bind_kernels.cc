#include "torch/bind_kernels.h"

#include <ATen/Functions.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "collective/gpu_transfer.h"
#include "common/dtype.h"
#include "kernels/device_plan.h"
#include "torch/arguments.h"
#include "torch/gpu.h"
#include "torch/tensor_adapter.h"

namespace fusewire::binding {
namespace {

using TensorList = std::vector<at::Tensor>;

// The engines' stream for one call: it comes after what the calling thread's current stream has been asked for, and
// finish() makes what that is asked for next come after it.
class OnEngineStream {
 public:
  explicit OnEngineStream(const at::Tensor& tensor) : gpu_(gpu_of(tensor)) {
    gpu_.mark_current()->hold_up(device().stream());
  }
  GpuDevice& device() const { return *gpu_.device(); }
  CudaApi& api() const { return device().api(); }
  CudaStream stream() const { return device().stream(); }
  void finish() const { gpu_.hold_up_current(*device().mark()); }

 private:
  static const gpu::Gpu& gpu_of(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) invalid("expected a CUDA tensor");
    return gpu::get(tensor.device().index());
  }

  const gpu::Gpu& gpu_;
};

void* contiguous_data(const at::Tensor& tensor, const OnEngineStream& on) {
  if (!tensor.is_cuda() || tensor.device().index() != on.device().index() || !tensor.is_contiguous()) {
    invalid("expected contiguous tensors on one GPU");
  }
  return tensor.mutable_data_ptr();
}

// ---- pack and unpack ----

TransferPlan plan_of(const TensorList& tensors, const at::Tensor& buffer, const std::vector<uint64_t>& offsets) {
  if (tensors.empty() || tensors.size() != offsets.size()) invalid("expected one offset for each of some tensors");
  TransferPlan plan(adapter::data_type(tensors[0]), adapter::data_type(buffer));
  for (size_t t = 0; t < tensors.size(); ++t) {
    const TensorView view = adapter::write_view(tensors[t]);
    if (offsets[t] + static_cast<uint64_t>(view.numel()) * buffer.itemsize() > buffer.nbytes()) {
      invalid("the buffer is too short");
    }
    plan.add(view, 0, view.numel(), offsets[t]);
  }
  return plan;
}

void transfer(const TensorList& tensors, const at::Tensor& buffer, const std::vector<uint64_t>& offsets, double factor,
              int64_t divisor, int times, void (CudaApi::*kernel)(const TransferArgs&)) {
  const OnEngineStream on(buffer);
  const TransferPlan plan = plan_of(tensors, buffer, offsets);
  const GpuLoan table = gpu_upload(on.device(), plan.table_bytes(), [&](void* at) { plan.write(at); });
  TransferArgs args = plan.args(table.get());
  args.buffer = contiguous_data(buffer, on);
  args.factor = factor;
  args.divisor = divisor;
  args.stream = on.stream();
  for (int t = 0; t < times; ++t) (on.api().*kernel)(args);
  on.finish();
}

void pack(const TensorList& tensors, const at::Tensor& buffer, const std::vector<uint64_t>& offsets, double factor,
          int times) {
  transfer(tensors, buffer, offsets, factor, 1, times, &CudaApi::pack);
}

void unpack(const TensorList& tensors, const at::Tensor& buffer, const std::vector<uint64_t>& offsets, double factor,
            int64_t divisor, int times) {
  transfer(tensors, buffer, offsets, factor, divisor, times, &CudaApi::unpack);
}

// ---- reduce, dot, combine ----

void sources_into(const TensorList& tensors, const OnEngineStream& on, const void** sources, size_t most) {
  if (tensors.empty() || tensors.size() > most) invalid("expected 1 to " + std::to_string(most) + " sources");
  for (size_t s = 0; s < tensors.size(); ++s) sources[s] = contiguous_data(tensors[s], on);
}

void reduce(const TensorList& sources, const at::Tensor& destination, int op, double factor, int64_t divisor,
            int times) {
  const OnEngineStream on(destination);
  DeviceReduceArgs args;
  sources_into(sources, on, args.sources, kMaxReduceSources);
  args.source_count = static_cast<int>(sources.size());
  args.destination = contiguous_data(destination, on);
  args.count = static_cast<uint64_t>(destination.numel());
  args.dtype = adapter::data_type(destination);
  args.op = static_cast<ReduceOp>(op);
  args.factor = factor;
  args.divisor = divisor;
  args.stream = on.stream();
  for (int t = 0; t < times; ++t) on.api().reduce(args);
  on.finish();
}

SpanPlan spans_of(const at::Tensor& buffer, const std::vector<uint64_t>& counts) {
  SpanPlan plan(adapter::data_type(buffer));
  uint64_t begin = 0;
  for (const uint64_t count : counts) {
    plan.add(begin, count);
    begin += count;
  }
  if (begin > static_cast<uint64_t>(buffer.numel())) invalid("the spans are longer than the buffer");
  return plan;
}

at::Tensor dot(const TensorList& sources, const std::vector<uint64_t>& counts, int times) {
  if (sources.empty()) invalid("expected 2 to 4 sources");
  const auto pairs = static_cast<int64_t>(sources.size() * (sources.size() + 1) / 2);
  at::Tensor dots = at::zeros({static_cast<int64_t>(counts.size()), pairs}, sources[0].options().dtype(at::kDouble));
  const OnEngineStream on(dots);
  const SpanPlan plan = spans_of(sources[0], counts);
  const GpuLoan table = gpu_upload(on.device(), plan.table_bytes(), [&](void* at) { plan.write(at); });
  const GpuLoan partials(on.device(), GpuMemory::kDevice, plan.slots() * static_cast<size_t>(pairs) * sizeof(double));
  const GpuLoan arrivals(on.device(), GpuMemory::kDevice, plan.spans() * sizeof(uint32_t));
  on.api().fill(arrivals.get(), 0, plan.spans() * sizeof(uint32_t), on.stream());
  DeviceDotArgs args = plan.dot_args(table.get());
  sources_into(sources, on, args.sources, kMaxDotSources);
  args.source_count = static_cast<int>(sources.size());
  args.dots = static_cast<double*>(contiguous_data(dots, on));
  args.partials = static_cast<double*>(partials.get());
  args.arrivals = static_cast<uint32_t*>(arrivals.get());
  args.stream = on.stream();
  for (int t = 0; t < times; ++t) on.api().dot(args);
  on.finish();
  return dots;
}

void combine(const TensorList& sources, const std::vector<uint64_t>& counts, const at::Tensor& numbers,
             const at::Tensor& destination, double factor, int times) {
  const OnEngineStream on(destination);
  const SpanPlan plan = spans_of(destination, counts);
  const GpuLoan table = gpu_upload(on.device(), plan.table_bytes(), [&](void* at) { plan.write(at); });
  DeviceCombineArgs args = plan.combine_args(table.get());
  sources_into(sources, on, args.sources, kMaxCombineSources);
  args.source_count = static_cast<int>(sources.size());
  const auto* given = static_cast<const double*>(contiguous_data(numbers, on));
  const auto columns = numbers.dim() == 2 ? numbers.size(1) : 0;
  if (numbers.scalar_type() != at::kDouble || numbers.size(0) != static_cast<int64_t>(counts.size())) {
    invalid("expected float64 numbers, one row for each span");
  }
  // Dot products as dot() gives them, of which the kernel makes Adasum's coefficients; or coefficients.
  if (sources.size() == 2 && columns == 3) {
    args.dots = given;
  } else if (columns == static_cast<int64_t>(sources.size())) {
    args.coefficients = given;
  } else {
    invalid("expected a column of numbers for each source, or the three dot products of two sources");
  }
  args.destination = contiguous_data(destination, on);
  args.factor = factor;
  args.stream = on.stream();
  for (int t = 0; t < times; ++t) on.api().combine(args);
  on.finish();
}

// ---- int8 ----

std::pair<at::Tensor, at::Tensor> quantise(const at::Tensor& values, uint32_t block, int times) {
  if (block == 0) invalid("expected a block of at least one value");
  const int64_t blocks = (values.numel() + block - 1) / block;
  at::Tensor quantised = at::empty({blocks * block}, values.options().dtype(at::kChar));
  at::Tensor scales = at::empty({blocks}, values.options().dtype(at::kFloat));
  const OnEngineStream on(values);
  DeviceQuantiseArgs args;
  args.values = contiguous_data(values, on);
  args.dtype = adapter::data_type(values);
  args.count = static_cast<uint64_t>(values.numel());
  args.block = block;
  args.quantised = static_cast<int8_t*>(contiguous_data(quantised, on));
  args.scales = static_cast<float*>(contiguous_data(scales, on));
  args.stream = on.stream();
  for (int t = 0; t < times; ++t) on.api().quantise(args);
  on.finish();
  return {quantised, scales};
}

void dequantise(const at::Tensor& quantised, const at::Tensor& scales, const at::Tensor& total, uint32_t block,
                uint32_t payloads, double factor, int times) {
  const OnEngineStream on(total);
  const auto blocks = (static_cast<uint64_t>(total.numel()) + block - 1) / block;
  if (static_cast<uint64_t>(quantised.numel()) < payloads * blocks * block ||
      static_cast<uint64_t>(scales.numel()) < payloads * blocks) {
    invalid("the payloads are shorter than the total");
  }
  DeviceDequantiseArgs args;
  args.quantised = static_cast<const int8_t*>(contiguous_data(quantised, on));
  args.scales = static_cast<const float*>(contiguous_data(scales, on));
  args.payloads = payloads;
  args.block = block;
  args.count = static_cast<uint64_t>(total.numel());
  args.total = contiguous_data(total, on);
  args.dtype = adapter::data_type(total);
  args.overwrite = true;
  args.factor = factor;
  args.stream = on.stream();
  for (int t = 0; t < times; ++t) on.api().dequantise(args);
  on.finish();
}

}  // namespace

// `times`: that often one after the other, for benchmarks. All work is put on the engines' stream; the calling thread's
// current stream then waits for it.
void register_kernels(py::module_& module) {
  py::module_ kernels = module.def_submodule("kernels", "The CUDA kernels by themselves, for tests and benchmarks.");
  const py::call_guard<py::gil_scoped_release> no_gil;
  const auto times = py::arg("times") = 1;
  const auto factor = py::arg("factor") = 1.0;
  const auto divisor = py::arg("divisor") = 1;
  kernels.def(
      "stream_id", [](int index) { return gpu::get(index).stream().id(); }, py::arg("index"),
      "Torch's number of the stream that engines use on that GPU.");
  kernels.def("pack", pack, py::arg("tensors"), py::arg("buffer"), py::arg("offsets"), factor, times, no_gil,
              "Tensors of one type into `buffer`, at byte offsets, scaled and cast.");
  kernels.def("unpack", unpack, py::arg("tensors"), py::arg("buffer"), py::arg("offsets"), factor, divisor, times,
              no_gil, "The way back.");
  kernels.def("reduce", reduce, py::arg("sources"), py::arg("destination"), py::arg("op"), factor, divisor, times,
              no_gil);
  kernels.def("dot", dot, py::arg("sources"), py::arg("counts"), times, no_gil,
              "For spans of so many elements, one after the other in each source: all dot products of the sources, "
              "float64 of (spans, pairs), pairs in the order 00 01 11 ...");
  kernels.def("combine", combine, py::arg("sources"), py::arg("counts"), py::arg("numbers"), py::arg("destination"),
              factor, times, no_gil,
              "Linear combinations per span. `numbers`: coefficients (spans, sources), or the dot products (spans, 3) "
              "of two sources, for Adasum's own coefficients.");
  kernels.def("quantise", quantise, py::arg("values"), py::arg("block") = 256, times, no_gil,
              "int8 values, padded to whole blocks, and a float32 scale per block.");
  kernels.def("dequantise", dequantise, py::arg("quantised"), py::arg("scales"), py::arg("total"),
              py::arg("block") = 256, py::arg("payloads") = 1, factor, times, no_gil,
              "total = factor * sum over the payloads, which lie one after the other.");
}

}  // namespace fusewire::binding
