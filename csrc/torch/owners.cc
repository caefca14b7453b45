#include "torch/owners.h"

#include <mutex>
#include <unordered_map>

#include "torch/grad_reducer.h"

namespace fusewire {
namespace {

struct Owner {
  std::weak_ptr<GradReducer> reducer;
  const GradReducer* address = nullptr;  // compared only
  size_t slot = 0;
};

struct Table {
  std::mutex mutex;  // a leaf: nothing is called while it is held
  std::unordered_map<const c10::TensorImpl*, Owner> owners;

  static Table& instance() {
    static Table& table = *new Table;  // reducers may outlive static destructors
    return table;
  }
};

}  // namespace

void Owners::take(const at::Tensor& parameter, const std::shared_ptr<GradReducer>& reducer, size_t slot) {
  Owner former;
  {
    Table& table = Table::instance();
    const std::lock_guard lock(table.mutex);
    Owner& owner = table.owners[parameter.unsafeGetTensorImpl()];
    former = std::exchange(owner, Owner{reducer, reducer.get(), slot});
  }
  const std::shared_ptr<GradReducer> other = former.reducer.lock();
  if (other && other != reducer) other->release(former.slot);
}

void Owners::drop(const at::Tensor& parameter, const GradReducer* reducer) {
  Table& table = Table::instance();
  const std::lock_guard lock(table.mutex);
  const auto entry = table.owners.find(parameter.unsafeGetTensorImpl());
  if (entry != table.owners.end() && entry->second.address == reducer) table.owners.erase(entry);
}

}  // namespace fusewire
