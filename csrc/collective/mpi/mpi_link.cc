#include "collective/mpi/mpi_link.h"

#include <sys/prctl.h>
#include <time.h>

#include <algorithm>
#include <limits>
#include <string>
#include <thread>

#include "common/error.h"
#include "common/futex.h"

namespace fusewire {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

constexpr int kTags = 32768;  // MPI guarantees 0 to 32767
// Once a bucket's messages move, a peer is copying, and this rank's own part of the transfer gets on only while it
// calls MPI: so many times longer a wait then looks before it naps.
constexpr int kMoving = 50;
// About half the speed at which MPI copies from process to process.
constexpr size_t kBytesPerNanosecond = 8;
constexpr microseconds kShortestNap{10};
constexpr microseconds kLongestNap{500};
constexpr std::chrono::milliseconds kCancelTime{50};

// Without this the kernel adds 50 us to every nap, in order to save wake-ups.
class PunctualThread {
 public:
  PunctualThread() : slack_(prctl(PR_GET_TIMERSLACK)) { prctl(PR_SET_TIMERSLACK, 1000UL); }
  ~PunctualThread() {
    if (slack_ > 0) prctl(PR_SET_TIMERSLACK, static_cast<unsigned long>(slack_));
  }
  PunctualThread(const PunctualThread&) = delete;
  PunctualThread& operator=(const PunctualThread&) = delete;

 private:
  const int slack_;
};

}  // namespace

// ---- the job ----

MpiJob::MpiJob(MpiProcess& process, int rank, int size, std::chrono::nanoseconds abort_after) : process_(process) {
  process_.start();
  process_.call([&] { meet(rank, size, abort_after); });
}

void MpiJob::meet(int rank, int size, std::chrono::nanoseconds abort_after) {
  MpiApi& mpi = api();
  int world_rank = 0;
  int world_size = 0;
  check_mpi(mpi, mpi.world(world_rank, world_size), "MPI_Comm_size");
  if (world_size != size) {
    throw Error(ErrorCode::kInvalidArgument,
                "the MPI backend needs all ranks in one MPI job: MPI sees " + std::to_string(world_size) +
                    " rank(s), Fusewire " + std::to_string(size) +
                    ". Start the job by the mpirun or srun of this MPI (" + mpi.library() + ")");
  }
  MpiRequest request;
  check_mpi(mpi, mpi.duplicate_world(comm_, request), "MPI_Comm_idup");
  complete(request, abort_after);
  check_mpi(mpi, mpi.return_errors(comm_), "MPI_Comm_set_errhandler");
  std::vector<int32_t> job_ranks(static_cast<size_t>(size));  // by MPI's rank
  const auto mine = static_cast<int32_t>(rank);
  check_mpi(mpi, mpi.gather_all(&mine, job_ranks.data(), sizeof(mine), comm_, request), "MPI_Iallgather");
  complete(request, abort_after);
  ranks_.assign(static_cast<size_t>(size), -1);
  for (int i = 0; i < size; ++i) {
    const int32_t there = job_ranks[static_cast<size_t>(i)];
    if (there < 0 || there >= size || ranks_[static_cast<size_t>(there)] >= 0) {
      throw Error(ErrorCode::kInvalidArgument,
                  "two processes of this MPI job say that they are rank " + std::to_string(there));
    }
    ranks_[static_cast<size_t>(there)] = i;
  }
}

void MpiJob::complete(MpiRequest& request, std::chrono::nanoseconds abort_after) {
  const auto begin = Clock::now();
  std::vector<int> finished;
  for (;;) {
    check_mpi(api(), api().test_some({&request, 1}, finished), "MPI_Testsome");
    if (!finished.empty()) return;
    if (abort_after.count() > 0 && Clock::now() - begin > abort_after) {
      note_abandoned();
      throw Error(ErrorCode::kStalled,
                  "the other ranks did not start their MPI backend: is FUSEWIRE_BACKEND=mpi set "
                  "on all of them?");
    }
    std::this_thread::sleep_for(microseconds(200));
  }
}

void MpiJob::note_abandoned() {
  abandoned_.store(true);
  process_.note_abandoned();
}

MpiJob::~MpiJob() {
  if (comm_.bits == 0 || abandoned_.load()) return;
  try {
    process_.call([this] {
      if (!api().finalized()) api().free(comm_);
    });
  } catch (const std::exception&) {
    // nobody is left who could be told
  }
}

// ---- the link ----

// What a wait does between two looks.
class MpiLink::Pause {
 public:
  Pause(MpiLink& link, size_t bytes) : link_(link), since_(Clock::now()) {
    const std::chrono::nanoseconds copying(bytes / kBytesPerNanosecond);
    patience_ = link.moving_ ? kMoving * link.spin_ : std::min(link.spin_ + copying, kMoving * link.spin_);
  }

  void got_on() {
    since_ = Clock::now();
    patience_ = kMoving * link_.spin_;
    nap_ = kShortestNap;
  }

  // True: this wait has lasted too long. `asleep` is called before each nap.
  template <typename Asleep>
  bool take(Asleep&& asleep) {
    const auto now = Clock::now();
    if (link_.abort_after_.count() > 0 && now - since_ > link_.abort_after_) return true;
    if (now - since_ < patience_) {
      cpu_relax();
      return false;
    }
    if (!punctual_) punctual_ = std::make_unique<PunctualThread>();
    link_.signals_.ask_if_due(now);
    asleep();
    const timespec nap{0, std::chrono::nanoseconds(nap_).count()};
    if (nanosleep(&nap, nullptr) != 0) link_.signals_.signalled();  // EINTR
    nap_ = std::min(2 * nap_, kLongestNap);
    return false;
  }

 private:
  MpiLink& link_;
  Clock::time_point since_;
  std::chrono::nanoseconds patience_;
  microseconds nap_ = kShortestNap;
  std::unique_ptr<PunctualThread> punctual_;
};

MpiLink::MpiLink(std::shared_ptr<MpiJob> job, const MpiOptions& options, StopWord stop)
    : job_(std::move(job)),
      api_(job_->api()),
      comm_(job_->comm()),
      rank_(options.rank),
      tag_(static_cast<int>(options.process_set % kTags)),
      spin_(options.spin),
      abort_after_(options.abort_after),
      stop_(stop) {
  for (const int32_t rank : options.ranks) peers_.push_back(job_->mpi_rank(rank));
}

void MpiLink::add(Purpose purpose, int peer, bool receive, const MpiRequest& request, size_t bytes) {
  if (outstanding_[purpose] == 0) bytes_[purpose] = 0;
  bytes_[purpose] += bytes;
  requests_.push_back(request);
  flights_.push_back({peer, purpose, receive});
  ++outstanding_[purpose];
}

void MpiLink::send(Purpose purpose, int peer, const std::byte* data, size_t bytes) {
  if (bytes == 0) return;
  MpiRequest request;
  check_mpi(api_, api_.send(data, static_cast<int>(bytes), peers_[static_cast<size_t>(peer)], tag_, comm_, request),
            "MPI_Isend");
  add(purpose, peer, false, request, bytes);
}

void MpiLink::receive(Purpose purpose, int peer, std::byte* data, size_t bytes) {
  if (bytes == 0) return;
  MpiRequest request;
  check_mpi(api_, api_.receive(data, static_cast<int>(bytes), peers_[static_cast<size_t>(peer)], tag_, comm_, request),
            "MPI_Irecv");
  add(purpose, peer, true, request, bytes);
}

bool MpiLink::progress() {
  check_mpi(api_, api_.test_some(requests_, finished_), "MPI_Testsome");
  if (finished_.empty()) return false;
  moving_ = true;
  std::sort(finished_.begin(), finished_.end(), std::greater<>());
  for (const int index : finished_) {
    const auto i = static_cast<size_t>(index);
    --outstanding_[flights_[i].purpose];
    requests_[i] = requests_.back();
    flights_[i] = flights_.back();
    requests_.pop_back();
    flights_.pop_back();
  }
  return true;
}

void MpiLink::wait(Purpose purpose) {
  stop_.throw_if_stopped("an MPI collective");
  if (outstanding_[purpose] == 0 || (progress() && outstanding_[purpose] == 0)) return;
  watch_.wait_begins();
  Pause pause(*this, bytes_[purpose]);
  while (outstanding_[purpose] > 0) {
    stop_.throw_if_stopped("an MPI collective");
    if (progress()) {
      pause.got_on();
    } else if (pause.take([&] { publish_laggards(purpose); })) {
      give_up();
    }
  }
  watch_.wait_ends();
  if (!laggards_.empty()) {
    const std::lock_guard lock(mutex_);
    laggards_.clear();
  }
}

void MpiLink::publish_laggards(Purpose purpose) {
  const std::lock_guard lock(mutex_);
  laggards_.clear();
  for (const Flight& flight : flights_) {
    if (flight.purpose == purpose) laggards_.push_back(flight.peer);
  }
  std::sort(laggards_.begin(), laggards_.end());
  laggards_.erase(std::unique(laggards_.begin(), laggards_.end()), laggards_.end());
}

std::vector<int> MpiLink::laggards() const {
  const std::lock_guard lock(mutex_);
  return laggards_;
}

void MpiLink::give_up() {
  const int culprit = flights_.front().peer;
  throw Error(ErrorCode::kStalled,
              "an MPI collective waited " + std::to_string(std::chrono::duration<double>(abort_after_).count()) +
                  " s for rank " + std::to_string(culprit),
              culprit);
}

// Note [Abandoned messages]
// There is no way to take back a message whose peer is gone. Receives are cancelled, so that nothing is written any
// more into tensors that the user is about to get back; what is in the middle of a transfer gets a moment to end. Sends
// are left to MPI, which then must not be finalised. Staging memory stays where it is until the engine is gone.
void MpiLink::abandon() noexcept {
  if (requests_.empty()) return;
  try {
    job_->note_abandoned();
    if (api_.finalized()) return;
    for (size_t i = 0; i < requests_.size(); ++i) {
      if (flights_[i].receive) api_.cancel(requests_[i]);
    }
    const auto until = Clock::now() + kCancelTime;
    while (!requests_.empty() && Clock::now() < until) {
      if (!progress()) std::this_thread::sleep_for(kShortestNap);
    }
  } catch (const std::exception&) {
    // An error of MPI on the way out changes nothing.
  }
  for (MpiRequest& request : requests_) api_.release(request);
  requests_.clear();
  flights_.clear();
  std::fill(std::begin(outstanding_), std::end(outstanding_), 0);
}

}  // namespace fusewire
