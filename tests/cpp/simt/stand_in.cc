#include "simt/stand_in.h"

#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace fusewire::simt {
namespace {

constexpr size_t kStackBytes = 128 * 1024;

// A stack of its own to run on, and the sanitizers' account of it.
class Context {
 public:
  Context() = default;
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;
  ~Context() {
#if defined(__SANITIZE_THREAD__)
    if (tsan_ != nullptr && stack_ != nullptr) __tsan_destroy_fiber(tsan_);
#endif
  }

  void prepare(void (*entry)()) {
    if (stack_ == nullptr) stack_ = std::make_unique<char[]>(kStackBytes);
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_.get();
    context_.uc_stack.ss_size = kStackBytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
#if defined(__SANITIZE_THREAD__)
    if (tsan_ != nullptr) __tsan_destroy_fiber(tsan_);
    tsan_ = __tsan_create_fiber(0);
#endif
  }

  // `last`: the one that leaves never comes back.
  void switch_to(Context& other, bool last = false) {
#if defined(__SANITIZE_ADDRESS__)
    void* fake_stack = nullptr;
    __sanitizer_start_switch_fiber(last ? nullptr : &fake_stack, other.bottom(), other.size());
#endif
#if defined(__SANITIZE_THREAD__)
    if (stack_ == nullptr) tsan_ = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(other.tsan_, 0);
#endif
    static_cast<void>(last);
    swapcontext(&context_, &other.context_);
#if defined(__SANITIZE_ADDRESS__)
    arrive(fake_stack, other);
#endif
  }

#if defined(__SANITIZE_ADDRESS__)
  // On arrival from `other`: if that is a thread's own stack, its place becomes known here.
  static void arrive(void* fake_stack, Context& other) {
    const void* bottom = nullptr;
    size_t size = 0;
    __sanitizer_finish_switch_fiber(fake_stack, &bottom, &size);
    if (other.stack_ == nullptr) {
      other.thread_bottom_ = bottom;
      other.thread_size_ = size;
    }
  }
  const void* bottom() const { return stack_ != nullptr ? stack_.get() : thread_bottom_; }
  size_t size() const { return stack_ != nullptr ? kStackBytes : thread_size_; }
#endif

 private:
  ucontext_t context_{};
  std::unique_ptr<char[]> stack_;  // null: the thread's own
#if defined(__SANITIZE_ADDRESS__)
  const void* thread_bottom_ = nullptr;
  size_t thread_size_ = 0;
#endif
#if defined(__SANITIZE_THREAD__)
  void* tsan_ = nullptr;
#endif
};

enum class State : uint8_t { kReady, kAtBlockBarrier, kAtWarpBarrier, kDone };

struct Fiber {
  Context context;
  State state = State::kDone;
  unsigned warp_round = 0;  // exchanges so far; its parity picks the slots
};

// Lanes may be one exchange apart, so values of two rounds are kept.
struct Warp {
  std::array<std::array<uint64_t, kWarp>, 2> slots{};
};

// What one host thread needs to play a GPU.
class Machine {
 public:
  void run(unsigned blocks, unsigned threads, const std::function<void()>& kernel) {
    if (kernel_ != nullptr) fail("a kernel launches a kernel");
    while (fibers_.size() < threads) fibers_.push_back(std::make_unique<Fiber>());
    kernel_ = &kernel;
    grid_size_ = blocks;
    block_size_ = threads;
    warps_.assign((threads + kWarp - 1) / kWarp, Warp{});
    std::vector<unsigned> order(blocks);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random_);
    for (const unsigned block : order) run_block(block);
    kernel_ = nullptr;
    ++launches_;
  }

  void wait(State state) {
    Fiber& self = current();
    self.state = state;
    self.context.switch_to(scheduler_);
  }

  Fiber& current() { return *fibers_[thread_]; }
  Warp& warp() { return warps_[thread_ / kWarp]; }
  unsigned width_of_warp(unsigned first) const { return std::min(kWarp, block_size_ - first); }

  std::mt19937_64 random_{1};
  uint64_t launches_ = 0;
  unsigned thread_ = 0;
  unsigned block_ = 0;
  unsigned block_size_ = 0;
  unsigned grid_size_ = 0;
  int gathered_or_ = 0;
  int result_or_ = 0;

 private:
  static void entry();

  void run_block(unsigned block) {
    block_ = block;
    std::vector<unsigned> order(block_size_);
    std::iota(order.begin(), order.end(), 0);
    for (unsigned i = 0; i < block_size_; ++i) {
      fibers_[i]->state = State::kReady;
      fibers_[i]->warp_round = 0;
      fibers_[i]->context.prepare(&entry);
    }
    // One warp and one thread are slow, so that others can be several steps ahead of them.
    const auto slow_warp = static_cast<unsigned>(random_() % warps_.size());
    const auto slow_thread = static_cast<unsigned>(random_() % block_size_);
    do {
      std::shuffle(order.begin(), order.end(), random_);
      for (const unsigned i : order) {
        if (fibers_[i]->state != State::kReady) continue;
        if ((i / kWarp == slow_warp || i == slow_thread) && random_() % 8 != 0) continue;
        thread_ = i;
        scheduler_.switch_to(fibers_[i]->context);
      }
    } while (release());
  }

  // Lets those go on who have waited for each other. False: all have returned.
  bool release() {
    if (count(0, block_size_, State::kDone) == block_size_) return false;
    bool any = count(0, block_size_, State::kReady) > 0;
    for (unsigned first = 0; first < block_size_; first += kWarp) {
      const unsigned width = width_of_warp(first);
      const unsigned waiting = count(first, width, State::kAtWarpBarrier);
      if (waiting == 0 || count(first, width, State::kReady) > 0) continue;
      if (waiting != width) {
        if (count(first, width, State::kDone) > 0) fail("lanes wait for lanes of their warp that have returned");
        fail("lanes of one warp wait at a warp's barrier and at the block's");
      }
      set(first, width, State::kReady);
      any = true;
    }
    if (any) return true;
    if (count(0, block_size_, State::kAtBlockBarrier) != block_size_) {
      fail("threads wait at __syncthreads for threads that have returned");
    }
    result_or_ = gathered_or_;
    gathered_or_ = 0;
    set(0, block_size_, State::kReady);
    return true;
  }

  unsigned count(unsigned first, unsigned n, State state) const {
    unsigned found = 0;
    for (unsigned i = first; i < first + n; ++i) found += fibers_[i]->state == state;
    return found;
  }
  void set(unsigned first, unsigned n, State state) {
    for (unsigned i = first; i < first + n; ++i) fibers_[i]->state = state;
  }

  Context scheduler_;
  std::vector<std::unique_ptr<Fiber>> fibers_;
  std::vector<Warp> warps_;
  const std::function<void()>* kernel_ = nullptr;
};

Machine& machine() {
  thread_local Machine instance;
  return instance;
}

void Machine::entry() {
  Machine& self = machine();
#if defined(__SANITIZE_ADDRESS__)
  Context::arrive(nullptr, self.scheduler_);
#endif
  (*self.kernel_)();
  self.current().state = State::kDone;
  self.current().context.switch_to(self.scheduler_, true);
}

}  // namespace

void launch(unsigned blocks, unsigned threads, const std::function<void()>& kernel) {
  if (blocks == 0 || threads == 0 || threads > 1024) fail("no GPU launches a grid of this size");
  machine().run(blocks, threads, kernel);
}

void seed(uint64_t value) { machine().random_.seed(value); }
uint64_t launches() { return machine().launches_; }
void count_launch() { ++machine().launches_; }

Index thread_index() { return {machine().thread_}; }
Index block_index() { return {machine().block_}; }
Index block_size() { return {machine().block_size_}; }
Index grid_size() { return {machine().grid_size_}; }

void wait_for_block() { machine().wait(State::kAtBlockBarrier); }

int wait_for_block_or(int predicate) {
  machine().gathered_or_ |= predicate != 0;
  wait_for_block();
  return machine().result_or_;
}

Exchange::Exchange(uint64_t value) {
  Machine& m = machine();
  auto& slots = m.warp().slots[m.current().warp_round++ % 2];
  slots[lane()] = value;
  m.wait(State::kAtWarpBarrier);
  values_ = slots.data();
}

unsigned lane() { return machine().thread_ % kWarp; }
unsigned warp_width() { return machine().width_of_warp(machine().thread_ / kWarp * kWarp); }

void fail(const char* sentence) {
  std::fprintf(stderr, "CUDA stand-in, block %u, thread %u: %s\n", machine().block_, machine().thread_, sentence);
  std::abort();
}

}  // namespace fusewire::simt
