#include "fake_cuda/call.h"

#include <ATen/SparseTensorImpl.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/SparseTensorUtils.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <string>
#include <utility>

#include "fake_cuda/memory.h"

namespace fusewire::fake {
namespace {

// Operators that wait on the host for what they read, and so for the whole stream.
bool waits_on_host(const std::string& name) {
  static const std::set<std::string> names = {"aten::_local_scalar_dense", "aten::equal",     "aten::nonzero",
                                              "aten::masked_select",       "aten::_unique2",  "aten::is_set_to",
                                              "aten::repeat_interleave",   "aten::unique_dim"};
  return names.count(name) > 0;
}

// Operators that change a tensor's shape or memory, and no memory's contents.
bool only_reshapes(const std::string& name) { return name == "aten::set_" || name == "aten::resize_"; }

void copy_bits(const at::Tensor& from, const at::Tensor& to) {
  c10::TensorImpl& impl = *to.unsafeGetTensorImpl();
  if (from.unsafeGetTensorImpl()->is_wrapped_number()) impl.set_wrapped_number(true);
  impl._set_conj(from.is_conj());
  impl._set_neg(from.is_neg());
}

at::Tensor dense(const c10::Storage& storage, c10::DispatchKey key, const at::Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  copy_bits(like, tensor);
  return tensor;
}

at::Tensor sparse(const at::Tensor& indices, const at::Tensor& values, c10::DispatchKey key, const at::Tensor& model) {
  const at::SparseTensorImpl& like = *at::sparse::get_sparse_impl(model);
  auto tensor = at::detail::make_tensor<at::SparseTensorImpl>(c10::DispatchKeySet(key), like.dtype());
  at::SparseTensorImpl& impl = *at::sparse::get_sparse_impl(tensor);
  impl.resize_(like.sparse_dim(), like.dense_dim(), like.sizes());
  impl.set_indices_and_values_unsafe(indices, values);
  impl.set_coalesced(like.coalesced());
  return tensor;
}

// What `stream` does from now on comes after what `other` has been asked for.
void follow(Gpu& gpu, CudaApi::Stream stream, CudaApi::Stream other) {
  const CudaApi::Event event = gpu.create_event(false);
  gpu.record(event, other);
  gpu.wait(stream, event);
  gpu.destroy_event(event);
}

std::optional<c10::Device> device_of(const c10::IValue& value) {
  const auto of_tensor = [](const at::Tensor& tensor) -> std::optional<c10::Device> {
    if (tensor.defined() && tensor.is_cuda()) return tensor.device();
    return std::nullopt;
  };
  if (value.isTensor()) return of_tensor(value.toTensor());
  if (value.isDevice()) return value.toDevice().is_cuda() ? std::optional(value.toDevice()) : std::nullopt;
  if (value.isStorage() && value.toStorage().device().is_cuda()) return value.toStorage().device();
  if (value.isTensorList() || value.isOptionalTensorList()) {
    for (const c10::IValue& one : value.toListRef()) {
      if (one.isNone()) continue;
      if (const auto device = of_tensor(one.toTensor())) return device;
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<c10::Device> Call::find_device() const {
  for (const c10::IValue& value : torch::jit::last(*stack_, op_.schema().arguments().size())) {
    if (const auto device = device_of(value)) return device;
  }
  return std::nullopt;
}

void Call::run() {
  const c10::FunctionSchema& schema = op_.schema();
  const auto device = find_device().value_or(c10::Device(c10::DeviceType::CUDA));
  const c10::DeviceGuard guard(device);
  Gpu& gpu = Gpu::get();
  const CudaApi::Stream stream = gpu.handle(current_stream(device.index()));

  const auto arguments = torch::jit::pop(*stack_, schema.arguments().size());
  bool host_reads = waits_on_host(schema.name());
  for (size_t a = 0; a < arguments.size(); ++a) {
    const auto* alias = schema.arguments()[a].alias_info();
    const bool writes = alias != nullptr && alias->isWrite();
    stack_->push_back(to_cpu(arguments[a]));
    if (arguments[a].isTensor() && arguments[a].toTensor().defined() && arguments[a].toTensor().is_cpu()) {
      host_reads |= schema.name() == "aten::copy_";
    }
    if (only_reshapes(schema.name()) || (alias != nullptr && !writes)) continue;  // a view touches nothing
    if (arguments[a].isTensor()) use(arguments[a].toTensor(), writes);
    if (arguments[a].isTensorList() || arguments[a].isOptionalTensorList()) {
      for (const c10::IValue& one : arguments[a].toListRef()) {
        if (!one.isNone()) use(one.toTensor(), writes);
      }
    }
  }

  // A copy between devices comes after what both are doing, and before what they do next.
  const std::vector<CudaApi::Stream> others = other_streams(stream);
  for (const CudaApi::Stream other : others) follow(gpu, stream, other);
  gpu.finish(stream);
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    op_.callBoxed(stack_);
  }
  for (const auto& [original, stand_in] : stand_ins_) take_over(original, stand_in);
  take_over_storages();
  auto results = torch::jit::pop(*stack_, schema.returns().size());
  for (const c10::IValue& result : results) stack_->push_back(from_cpu(result));

  gpu.launch(schema.name(), stream, uses_, nullptr);
  gpu.finish(stream);
  for (const CudaApi::Stream other : others) follow(gpu, other, stream);
  if (host_reads) gpu.synchronize_stream(stream);
}

std::vector<CudaApi::Stream> Call::other_streams(CudaApi::Stream own) const {
  std::vector<CudaApi::Stream> streams;
  for (const auto& [original, stand_in] : stand_ins_) {
    streams.push_back(Gpu::get().handle(current_stream(original.device().index())));
  }
  std::sort(streams.begin(), streams.end());
  streams.erase(std::unique(streams.begin(), streams.end()), streams.end());
  std::erase(streams, own);
  return streams;
}

void Call::use(const at::Tensor& tensor, bool writes) {
  if (!tensor.defined() || !tensor.is_cuda() || tensor.layout() != at::kStrided || tensor.numel() == 0) return;
  int64_t extent = 1;
  for (int64_t d = 0; d < tensor.dim(); ++d) extent += (tensor.size(d) - 1) * tensor.stride(d);
  uses_.push_back({tensor.const_data_ptr(), static_cast<size_t>(extent) * tensor.itemsize(), writes});
}

// ---- to the CPU ----

c10::IValue Call::to_cpu(const c10::IValue& value) {
  if (value.isTensor()) return to_cpu(value.toTensor());
  if (value.isDevice()) return value.toDevice().is_cuda() ? c10::Device(c10::DeviceType::CPU) : value.toDevice();
  if (value.isStorage()) return to_cpu(value.toStorage());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const c10::IValue& one : value.toListRef()) list.push_back(to_cpu(one.toTensor()));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const c10::IValue& one : value.toListRef()) {
      list.push_back(one.isNone() ? std::nullopt : std::optional(to_cpu(one.toTensor())));
    }
    return list;
  }
  return value;
}

at::Tensor Call::to_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  for (const auto& [original, stand_in] : stand_ins_) {
    if (original.is_same(tensor)) return stand_in;
  }
  at::Tensor stand_in;
  if (tensor.is_sparse()) {
    const at::SparseTensorImpl& impl = *at::sparse::get_sparse_impl(tensor);
    stand_in = sparse(to_cpu(impl.indices()), to_cpu(impl.values()), c10::DispatchKey::SparseCPU, tensor);
  } else {
    stand_in = dense(to_cpu(tensor.storage()), c10::DispatchKey::CPU, tensor);
  }
  stand_ins_.emplace_back(tensor, stand_in);
  return stand_in;
}

c10::Storage Call::to_cpu(const c10::Storage& storage) {
  if (!storage.device().is_cuda()) return storage;
  const c10::StorageImpl* const impl = storage.unsafeGetStorageImpl();
  if (const auto found = storages_.find(impl); found != storages_.end()) return found->second.second;
  auto* const owner = new c10::Storage(storage);
  c10::DataPtr data(
      const_cast<void*>(storage.data()), owner, [](void* context) { delete static_cast<c10::Storage*>(context); },
      c10::Device(c10::DeviceType::CPU));
  c10::Storage stand_in(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data),
                        c10::GetAllocator(c10::DeviceType::CPU), /*resizable=*/true);
  storages_.emplace(impl, std::make_pair(storage, stand_in));
  return stand_in;
}

// ---- and back ----

void Call::take_over(const at::Tensor& original, const at::Tensor& stand_in) {
  if (original.is_sparse()) {
    const at::SparseTensorImpl& now = *at::sparse::get_sparse_impl(stand_in);
    at::SparseTensorImpl& impl = *at::sparse::get_sparse_impl(original);
    impl.raw_resize_(now.sparse_dim(), now.dense_dim(), now.sizes());
    impl.set_indices_and_values_unsafe(from_cpu(now.indices()), from_cpu(now.values()));
    impl.set_coalesced(now.coalesced());
    return;
  }
  const auto known = storages_.find(original.storage().unsafeGetStorageImpl());
  if (known != storages_.end() && !stand_in.storage().is_alias_of(known->second.second)) {  // set_()
    original.unsafeGetTensorImpl()->set_storage_keep_dtype(from_cpu(stand_in.storage()));
  }
  if (original.sizes() != stand_in.sizes() || original.strides() != stand_in.strides() ||
      original.storage_offset() != stand_in.storage_offset()) {
    original.unsafeGetTensorImpl()->set_sizes_and_strides(stand_in.sizes(), stand_in.strides(),
                                                          stand_in.storage_offset());
  }
  original.unsafeGetTensorImpl()->_set_conj(stand_in.is_conj());
  original.unsafeGetTensorImpl()->_set_neg(stand_in.is_neg());
}

// Of outputs that the kernel has made larger.
void Call::take_over_storages() {
  for (const auto& [impl, both] : storages_) {
    const auto& [original, stand_in] = both;
    if (original.data() == stand_in.data() && original.nbytes() == stand_in.nbytes()) continue;
    c10::StorageImpl& to = *original.unsafeGetStorageImpl();
    c10::DataPtr memory = allocator().allocate(stand_in.nbytes());
    if (stand_in.nbytes() > 0) std::memcpy(memory.get(), stand_in.data(), stand_in.nbytes());
    to.set_data_ptr_noswap(std::move(memory));
    to.set_nbytes(stand_in.nbytes());
  }
}

c10::IValue Call::from_cpu(const c10::IValue& value) {
  if (value.isTensor()) return from_cpu(value.toTensor());
  if (value.isStorage()) return from_cpu(value.toStorage());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const c10::IValue& one : value.toListRef()) list.push_back(from_cpu(one.toTensor()));
    return list;
  }
  return value;
}

at::Tensor Call::from_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cpu()) return tensor;
  for (const auto& [original, stand_in] : stand_ins_) {
    if (stand_in.is_same(tensor)) return original;
  }
  if (tensor.is_sparse()) {
    const at::SparseTensorImpl& impl = *at::sparse::get_sparse_impl(tensor);
    return sparse(from_cpu(impl.indices()), from_cpu(impl.values()), c10::DispatchKey::SparseCUDA, tensor);
  }
  const bool is_new = std::none_of(storages_.begin(), storages_.end(),
                                   [&](const auto& one) { return one.second.second.is_alias_of(tensor.storage()); });
  const at::Tensor result = dense(from_cpu(tensor.storage()), c10::DispatchKey::CUDA, tensor);
  if (is_new) use(result, true);
  return result;
}

c10::Storage Call::from_cpu(const c10::Storage& storage) {
  if (storage.device().is_cuda()) return storage;
  for (const auto& [impl, both] : storages_) {
    if (both.second.is_alias_of(storage)) return both.first;
  }
  auto owner = std::make_unique<c10::Storage>(storage);
  void* const memory = const_cast<void*>(storage.data());
  c10::DataPtr kept(
      memory, owner.release(), [](void* context) { delete static_cast<c10::Storage*>(context); },
      c10::Device(c10::DeviceType::CPU));
  c10::Storage original(c10::Storage::use_byte_size_t(), storage.nbytes(), adopt(std::move(kept), storage.nbytes()),
                        &allocator(), /*resizable=*/true);
  storages_.emplace(original.unsafeGetStorageImpl(), std::make_pair(original, storage));
  return original;
}

}  // namespace fusewire::fake
