#include "collective/shm_wait.h"

#include <algorithm>
#include <optional>
#include <string>

#include "collective/stop_word.h"
#include "common/futex.h"

namespace fusewire {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kBytesPerNanosecond = 8;  // half the speed at which one rank reads another's memory
constexpr int kLooksPerClock = 8;          // reading the clock costs about as much as a pause

std::string list(const std::vector<int>& ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

}  // namespace

ShmWaiter::ShmWaiter(ShmRegion region, int rank, std::chrono::nanoseconds spin, std::chrono::nanoseconds abort_after)
    : region_(region),
      rank_(rank),
      spin_(spin),
      abort_after_(abort_after),
      seen_(static_cast<size_t>(region.size()) * kShmStages, 0) {}

void ShmWaiter::note(ShmStage stage, int64_t chunk) {
  region_.progress(rank_).reached[static_cast<int>(stage)].store(chunk, std::memory_order_release);
}

void ShmWaiter::publish(ShmStage stage, int64_t chunk) {
  // An exchange, not a store: it is the full barrier that Note [Waking sleepers] needs, in the form that
  // ThreadSanitizer understands.
  region_.progress(rank_).reached[static_cast<int>(stage)].exchange(chunk, std::memory_order_seq_cst);
  if (region_.header().sleeping.load(std::memory_order_seq_cst) != 0) wake_fulfilled();
}

void ShmWaiter::wake_fulfilled() {
  for (int rank = 0; rank < region_.size(); ++rank) {
    ShmSleeper& sleeper = region_.sleeper(rank);
    if (rank == rank_ || sleeper.asleep.load(std::memory_order_seq_cst) == 0) continue;
    const auto stage = sleeper.stage.load(std::memory_order_relaxed);
    const int64_t target = sleeper.target.load(std::memory_order_relaxed);
    const int last = sleeper.last.load(std::memory_order_relaxed);
    bool all = true;
    for (int peer = sleeper.first.load(std::memory_order_relaxed); all && peer < last; ++peer) {
      all = peer == rank || region_.progress(peer).reached[stage].load(std::memory_order_seq_cst) >= target;
    }
    if (all && sleeper.asleep.exchange(0, std::memory_order_seq_cst) == 1) futex_wake(sleeper.asleep, 1);
  }
}

bool ShmWaiter::fulfilled(int first, int last, ShmStage stage, int64_t chunk) {
  for (int peer = first; peer < last; ++peer) {
    if (peer == rank_) continue;
    int64_t& seen = seen_[static_cast<size_t>(peer * kShmStages) + static_cast<size_t>(stage)];
    if (seen >= chunk) continue;
    seen = region_.progress(peer).reached[static_cast<int>(stage)].load(std::memory_order_seq_cst);
    if (seen < chunk) return false;
  }
  return true;
}

void ShmWaiter::wait_for_copies(ShmStage stage, int64_t chunk, size_t bytes) {
  const std::chrono::nanoseconds copying(bytes / kBytesPerNanosecond);
  wait(0, region_.size(), stage, chunk, spin_.count() > 0 ? spin_ + copying : spin_);
}

void ShmWaiter::wait(int first, int last, ShmStage stage, int64_t chunk, std::chrono::nanoseconds spin) {
  throw_if_stopped();
  if (fulfilled(first, last, stage, chunk)) return;
  if (watch_ != nullptr) watch_->wait_begins();
  wait_slowly(first, last, stage, chunk, spin);
  if (watch_ != nullptr) watch_->wait_ends();
}

void ShmWaiter::wait_slowly(int first, int last, ShmStage stage, int64_t chunk, std::chrono::nanoseconds spin) {
  if (spin.count() > 0) {
    const auto until = Clock::now() + spin;
    do {
      for (int i = 0; i < kLooksPerClock; ++i) {
        cpu_relax();
        if (fulfilled(first, last, stage, chunk)) return;
      }
      throw_if_stopped();
    } while (Clock::now() < until);
  }
  std::optional<Clock::time_point> deadline;
  if (abort_after_.count() > 0) deadline = Clock::now() + abort_after_;
  while (!fulfilled(first, last, stage, chunk)) {
    throw_if_stopped();
    const auto now = Clock::now();
    if (deadline && now >= *deadline) give_up(behind(first, last, stage, chunk));
    signals_.ask_if_due(now);
    std::optional<Clock::time_point> until = deadline;
    if (const auto due = signals_.due()) until = std::min(deadline.value_or(*due), *due);
    const std::chrono::nanoseconds limit = until ? *until - now : std::chrono::nanoseconds(0);
    sleep(first, last, stage, chunk, limit);
  }
}

void ShmWaiter::sleep(int first, int last, ShmStage stage, int64_t chunk, std::chrono::nanoseconds limit) {
  ShmSleeper& own = region_.sleeper(rank_);
  own.stage.store(static_cast<uint32_t>(stage), std::memory_order_relaxed);
  own.target.store(chunk, std::memory_order_relaxed);
  own.first.store(first, std::memory_order_relaxed);
  own.last.store(last, std::memory_order_relaxed);
  waiting_.store(true, std::memory_order_release);
  ShmHeader& header = region_.header();
  header.sleeping.fetch_add(1, std::memory_order_seq_cst);
  own.asleep.exchange(1, std::memory_order_seq_cst);
  if (!fulfilled(first, last, stage, chunk) && header.aborted.load(std::memory_order_seq_cst) == 0) {
    if (futex_wait(own.asleep, 1, limit.count() > 0 ? std::optional(limit) : std::nullopt)) signals_.signalled();
  }
  own.asleep.exchange(0, std::memory_order_seq_cst);
  header.sleeping.fetch_sub(1, std::memory_order_seq_cst);
  waiting_.store(false, std::memory_order_release);
}

void ShmWaiter::stop(ErrorCode code, int rank) noexcept {
  StopWord(region_.header().aborted).stop(code, rank);
  for (int peer = 0; peer < region_.size(); ++peer) {
    std::atomic<uint32_t>& asleep = region_.sleeper(peer).asleep;
    asleep.exchange(0, std::memory_order_seq_cst);
    futex_wake(asleep, 1);
  }
}

void ShmWaiter::throw_if_stopped() const {
  StopWord(region_.header().aborted).throw_if_stopped("a shared-memory collective");
}

std::vector<int> ShmWaiter::behind(int first, int last, ShmStage stage, int64_t chunk) const {
  std::vector<int> late;
  for (int peer = first; peer < last; ++peer) {
    if (peer == rank_) continue;
    const auto& reached = region_.progress(peer).reached[static_cast<int>(stage)];
    if (reached.load(std::memory_order_seq_cst) < chunk) late.push_back(peer);
  }
  return late;
}

void ShmWaiter::give_up(const std::vector<int>& late) {
  const int culprit = late.empty() ? -1 : late.front();
  stop(ErrorCode::kStalled, culprit);
  throw Error(ErrorCode::kStalled,
              "a shared-memory collective waited " +
                  std::to_string(std::chrono::duration<double>(abort_after_).count()) + " s for " + list(late),
              culprit);
}

std::vector<int> ShmWaiter::laggards() const {
  if (!waiting_.load(std::memory_order_acquire)) return {};
  const ShmSleeper& own = region_.sleeper(rank_);
  return behind(own.first.load(std::memory_order_relaxed), own.last.load(std::memory_order_relaxed),
                static_cast<ShmStage>(own.stage.load(std::memory_order_relaxed)),
                own.target.load(std::memory_order_relaxed));
}

}  // namespace fusewire
