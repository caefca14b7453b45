// From the root down a binomial tree, message by message: a member passes one on while the next is on its way to it.
#include <algorithm>
#include <vector>

#include "collective/mpi/mpi_context.h"

namespace fusewire {
namespace {

using Purpose = MpiLink::Purpose;

class Broadcast {
 public:
  Broadcast(MpiContext& context, int root)
      : context_(context),
        cursor_(context.cursor),
        step_(context.message_elements(cursor_.wire_bytes()) * (context.size() == 2 ? kUnrelayed : 1)) {
    const int size = context.size();
    const int place = (context.rank() - root + size) % size;  // in the tree; the root's is 0
    const int reach = place == 0 ? size : place & -place;     // places [place, place + reach) are this one's branch
    for (int further = 1; further < reach && place + further < size; further *= 2) {
      children_.insert(children_.begin(), (context.rank() + further) % size);  // the largest branch first
    }
    parent_ = place == 0 ? -1 : (context.rank() - reach + size) % size;
  }

  void run() {
    const auto trace = context_.link.watch().step(parent_ < 0 ? ChunkStep::kPack : ChunkStep::kUnpack);
    const int64_t messages = (cursor_.elements() + step_ - 1) / step_;
    if (parent_ >= 0 && messages > 0) receive(0);
    for (int64_t k = 0; k < messages; ++k) {
      if (parent_ >= 0) {
        context_.link.wait(from_parent(k));
        if (k + 1 < messages) {
          context_.link.wait(to_children(k + 1));  // of message k-1, out of the same staging
          receive(k + 1);
        }
      } else {
        context_.link.wait(to_children(k));
      }
      const std::byte* data = parent_ >= 0 ? place(k) : source(k);
      for (const int child : children_) context_.link.send(to_children(k), child, data, bytes(k));
      if (parent_ >= 0 && cursor_.output_at(begin(k), end(k)) == nullptr) cursor_.scatter(data, begin(k), end(k));
    }
    if (parent_ < 0) cursor_.copy_across(0, cursor_.elements());
    context_.link.wait(MpiLink::kReturn);
    context_.link.wait(MpiLink::kReturnNext);
  }

 private:
  static Purpose from_parent(int64_t k) { return k % 2 == 0 ? MpiLink::kGive : MpiLink::kGiveNext; }
  static Purpose to_children(int64_t k) { return k % 2 == 0 ? MpiLink::kReturn : MpiLink::kReturnNext; }

  int64_t begin(int64_t k) const { return k * step_; }
  int64_t end(int64_t k) const { return std::min(begin(k) + step_, cursor_.elements()); }
  size_t bytes(int64_t k) const { return static_cast<size_t>(end(k) - begin(k)) * cursor_.wire_bytes(); }

  // Where message k is received.
  std::byte* place(int64_t k) {
    std::byte* const there = cursor_.output_at(begin(k), end(k));
    return there != nullptr ? there : staging(k);
  }

  const std::byte* source(int64_t k) {
    const std::byte* const there = cursor_.input_at(begin(k), end(k));
    if (there != nullptr) return there;
    cursor_.gather(begin(k), end(k), staging(k));
    return staging(k);
  }

  // Message k-2, which lay here before, has been waited for.
  std::byte* staging(int64_t k) { return context_.stage(static_cast<size_t>(k % 2), bytes(k)); }

  void receive(int64_t k) { context_.link.receive(from_parent(k), parent_, place(k), bytes(k)); }

  // Between two members nobody passes anything on, so messages are that many times longer: a rendezvous less per each.
  static constexpr int64_t kUnrelayed = 8;

  MpiContext& context_;
  BucketCursor& cursor_;
  const int64_t step_;
  int parent_;
  std::vector<int> children_;
};

}  // namespace

void mpi_broadcast(MpiContext& context, int root) { Broadcast(context, root).run(); }

}  // namespace fusewire
