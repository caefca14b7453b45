// An exchange without slots: every rank says where its parts lie, and whoever takes one reads it from there.
#include <algorithm>
#include <cstring>
#include <type_traits>
#include <vector>

#include "collective/shm_exchange.h"

namespace fusewire {
namespace {

// Note [Direct exchange]
// A part that goes through a slot crosses from core to core twice: the packer takes the slot's lines away from their
// last reader, then the reader fetches them. Reading the giver's own memory saves the first crossing, and costs a
// system call per part, which pins its pages one by one, and one more wait at the end: nobody may leave (and change its
// input) before all have read it. That pays for medium sizes; small ones are quicker through slots, and large ones
// too, since streaming stores go around the caches and the kernel's copy does not. In a broadcast one rank gives and
// has nothing else to do, so that last wait is the time of a copy, which is longer than a wait spins otherwise: without
// more patience every one would end in a sleep and a wake-up, half as long again as the copy of 1 MB.
//
// Memory that cannot be read (a driver has mapped it, its owner is about to die, ...) shows only when it is tried. Who
// meets some writes down, before it says that it is through, that this exchange failed; since everybody waits for
// everybody then, all see it, do the bucket again through slots, and read nobody's memory from then on. A peer that has
// died is waited for there, and whoever watches it ends that wait.
//
// The giver's slot holds a table of stretches: from which element of its row on the elements lie at which address. What
// is strided, absent or small is packed into memory of the giver first.
struct Stretch {
  int64_t begin;
  const std::byte* address;
};

constexpr size_t kSmallPart = 16 << 10;  // a few pages: cheaper to pack than to pin

struct Table {
  std::byte* slot;

  void write(const std::vector<Stretch>& stretches) const {
    const uint64_t count = stretches.size();
    std::memcpy(slot, &count, sizeof(count));
    if (count > 0) std::memcpy(slot + sizeof(count), stretches.data(), count * sizeof(Stretch));
  }
  size_t count() const {
    uint64_t count;
    std::memcpy(&count, slot, sizeof(count));
    return count;
  }
  Stretch operator[](size_t i) const {
    Stretch stretch;
    std::memcpy(&stretch, slot + sizeof(uint64_t) + i * sizeof(Stretch), sizeof(stretch));
    return stretch;
  }
};

// Finds out, with all other ranks, whether everybody can read everybody's memory: two chunks, with cards, then answers.
void get_acquainted(ShmContext& context) {
  const auto round = [&](const auto& mine, auto&& look) {
    const int64_t number = ++context.chunk;
    context.waiter.wait_all(ShmStage::kCopied, number - kShmBuffers);  // Note [Slot reuse]
    std::memcpy(context.region.slot(context.rank, number), &mine, sizeof(mine));
    context.waiter.publish(ShmStage::kPacked, number);
    context.waiter.wait_all(ShmStage::kPacked, number);
    for (int peer = 0; peer < context.size(); ++peer) {
      std::remove_cvref_t<decltype(mine)> theirs;
      std::memcpy(&theirs, context.region.slot(peer, number), sizeof(theirs));
      look(peer, theirs);
    }
    context.waiter.note(ShmStage::kReduced, number);
    context.waiter.publish(ShmStage::kCopied, number);
  };
  uint64_t reads_all = 1;
  round(context.peers.card(), [&](int peer, const MemoryCard& card) {
    if (!context.peers.try_card(peer, card)) reads_all = 0;
  });
  const uint64_t mine = reads_all;
  round(mine, [&](int, uint64_t theirs) { reads_all &= theirs; });
  context.peers.set_everyone(reads_all != 0);
}

class DirectExchange {
 public:
  DirectExchange(ShmContext& context, BucketCursor& own) : context_(context), own_(own), number_(++context.chunk) {}

  // False: somebody could not read somebody's memory.
  bool run() {
    context_.waiter.wait_all(ShmStage::kCopied, number_ - kShmBuffers);  // Note [Slot reuse]
    {
      const auto trace = context_.watch.step(ChunkStep::kPack);
      offer();
      context_.waiter.publish(ShmStage::kPacked, number_);
    }
    const auto trace = context_.watch.step(ChunkStep::kUnpack);
    own_.copy_across(0, own_.elements());
    if (context_.crowded && givers() > 1) context_.waiter.wait_all(ShmStage::kPacked, number_);
    bool good = true;
    for (int step = 1; good && step < context_.size(); ++step) good = take((context_.rank + step) % context_.size());
    if (!good) context_.region.progress(context_.rank).unreadable.store(number_, std::memory_order_relaxed);
    context_.waiter.note(ShmStage::kReduced, number_);
    context_.waiter.publish(ShmStage::kCopied, number_);
    context_.waiter.wait_for_copies(ShmStage::kCopied, number_, longest_bytes());  // of everybody
    for (int rank = 0; rank < context_.size(); ++rank) {
      good = good && context_.region.progress(rank).unreadable.load(std::memory_order_relaxed) != number_;
    }
    return good;
  }

 private:
  BucketCursor& row(int rank) { return context_.rows[static_cast<size_t>(rank)]; }
  Table table(int rank) const { return {context_.region.slot(rank, number_)}; }

  // Ranks that this one takes from.
  int givers() {
    int count = 0;
    for (int peer = 0; peer < context_.size(); ++peer) count += peer != context_.rank && row(peer).elements() > 0;
    return count;
  }

  size_t longest_bytes() {
    size_t most = 0;
    for (const BucketCursor& one : context_.rows) {
      most = std::max(most, static_cast<size_t>(one.elements()) * one.wire_bytes());
    }
    return most;
  }

  void offer() {
    BucketCursor& given = row(context_.rank);
    const size_t width = given.wire_bytes();
    const auto in_memory = [&](const BucketCursor::Piece& piece) {
      return piece.in != nullptr && static_cast<size_t>(piece.count) * width >= kSmallPart;
    };
    size_t packed = 0;
    given.for_each(0, given.elements(), [&](const BucketCursor::Piece& piece) {
      if (!in_memory(piece)) packed += static_cast<size_t>(piece.count) * width;
    });
    context_.scratch.resize(packed);
    std::byte* next = context_.scratch.data();
    std::vector<Stretch> stretches;
    bool follows = false;  // a part that was packed too
    given.for_each(0, given.elements(), [&](const BucketCursor::Piece& piece) {
      if (in_memory(piece)) {
        stretches.push_back({piece.begin, piece.in});
        follows = false;
        return;
      }
      if (!follows) stretches.push_back({piece.begin, next});
      follows = true;
      given.gather_part(piece, next);
      next += static_cast<size_t>(piece.count) * width;
    });
    table(context_.rank).write(stretches);
  }

  bool take(int peer) {
    BucketCursor& taken = row(peer);
    if (taken.elements() == 0) return true;
    context_.waiter.wait_for(peer, ShmStage::kPacked, number_);
    const Table stretches = table(peer);
    const size_t width = taken.wire_bytes();
    size_t at = 0;  // the stretch of the next element
    copies_.clear();
    strip_.resize(strided_bytes(taken));
    std::byte* next = strip_.data();
    for_each_wanted(taken, [&](const BucketCursor::Piece& piece) {
      std::byte* const to = piece.out != nullptr ? piece.out : next;
      if (piece.out == nullptr) next += static_cast<size_t>(piece.count) * width;
      const int64_t last = piece.begin + piece.count;
      for (int64_t begin = piece.begin; begin < last;) {
        while (at + 1 < stretches.count() && stretches[at + 1].begin <= begin) ++at;
        const int64_t end = at + 1 < stretches.count() ? std::min(stretches[at + 1].begin, last) : last;
        add(to + static_cast<size_t>(begin - piece.begin) * width,
            stretches[at].address + static_cast<size_t>(begin - stretches[at].begin) * width,
            static_cast<size_t>(end - begin) * width);
        begin = end;
      }
    });
    if (!context_.peers.read(peer, copies_)) return false;
    next = strip_.data();
    for_each_wanted(taken, [&](const BucketCursor::Piece& piece) {
      if (piece.out != nullptr) return;
      taken.scatter_part(piece, next);
      next += static_cast<size_t>(piece.count) * width;
    });
    return true;
  }

  template <typename Visit>
  void for_each_wanted(BucketCursor& taken, Visit&& visit) {
    taken.for_each(taken.first(), taken.first() + taken.elements(), [&](const BucketCursor::Piece& piece) {
      if (piece.output->data != nullptr) visit(piece);
    });
  }

  size_t strided_bytes(BucketCursor& taken) {
    size_t bytes = 0;
    for_each_wanted(taken, [&](const BucketCursor::Piece& piece) {
      if (piece.out == nullptr) bytes += static_cast<size_t>(piece.count) * taken.wire_bytes();
    });
    return bytes;
  }

  void add(std::byte* to, const std::byte* from, size_t bytes) {
    if (!copies_.empty() && copies_.back().to + copies_.back().bytes == to &&
        copies_.back().from + copies_.back().bytes == from) {
      copies_.back().bytes += bytes;
    } else {
      copies_.push_back({to, from, bytes});
    }
  }

  ShmContext& context_;
  BucketCursor& own_;
  int64_t number_;
  std::vector<PeerMemory::Copy> copies_;
  std::vector<std::byte> strip_;  // what goes to strided outputs
};

}  // namespace

bool shm_exchange_directly(ShmContext& context, BucketCursor& own, size_t most_parts) {
  if (most_parts > (kShmMaxChunk - sizeof(uint64_t)) / sizeof(Stretch)) return false;
  if (!context.peers.known()) get_acquainted(context);
  if (!context.peers.everyone()) return false;
  if (DirectExchange(context, own).run()) return true;
  context.peers.set_everyone(false);
  return false;
}

}  // namespace fusewire
