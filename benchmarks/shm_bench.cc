// What the shared-memory data plane alone costs: no engine, no torch, ranks as forked processes.
//
//   shm_bench [-n RANKS] [-t SECONDS_PER_ROW] [--spin US] [--chunk BYTES] [--direct BYTES] [--out-of-place] [--pin]
//   [ROW...]
//
// Rows are named like the table's first column; without any, all run. A time is that of the slowest rank in one
// iteration; "min" and "median" are over iterations. Sizes are those of a rank's input. memcpy is glibc's, by all ranks
// at once, of as many bytes, with the destination touched before. It runs interleaved with the collective, so both see
// the same neighbours.
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "collective/shm.h"
#include "kernels/kernels.h"

namespace fusewire {
namespace {

using Clock = std::chrono::steady_clock;

struct Row {
  std::string name;
  DataType dtype;
  DataType wire;
  std::vector<int64_t> counts;  // elements of each tensor
  OpKind kind = OpKind::kAllreduce;
  ReduceOp op = ReduceOp::kAverage;
};

// Convolutions, normalisations and the classifier of ResNet-50: 161 tensors, 25.6 million parameters.
std::vector<int64_t> resnet50() {
  std::vector<int64_t> counts = {64 * 3 * 49, 64, 64};
  int64_t in = 64;
  const int blocks[] = {3, 4, 6, 3};
  for (int stage = 0; stage < 4; ++stage) {
    const int64_t width = int64_t{64} << stage;
    for (int block = 0; block < blocks[stage]; ++block) {
      const auto layer = [&](int64_t out, int64_t weights) { counts.insert(counts.end(), {weights, out, out}); };
      layer(width, in * width);
      layer(width, width * width * 9);
      layer(4 * width, width * width * 4);
      if (block == 0) layer(4 * width, in * width * 4);
      in = 4 * width;
    }
  }
  counts.insert(counts.end(), {2048 * 1000, 1000});
  return counts;
}

// 12 layers of GPT-2 small: 148 tensors, 124 million parameters.
std::vector<int64_t> gpt2() {
  std::vector<int64_t> counts = {50257 * 768, 1024 * 768};
  for (int layer = 0; layer < 12; ++layer) {
    counts.insert(counts.end(),
                  {768, 768, 768 * 2304, 2304, 768 * 768, 768, 768, 768, 768 * 3072, 3072, 3072 * 768, 768});
  }
  counts.insert(counts.end(), {768, 768});
  return counts;
}

std::vector<Row> all_rows() {
  std::vector<Row> rows;
  const DataType f32 = DataType::kFloat32;
  for (const auto& [name, bytes] : std::vector<std::pair<const char*, int64_t>>{{"4B", 4},
                                                                                {"1KB", 1 << 10},
                                                                                {"4KB", 4 << 10},
                                                                                {"8KB", 8 << 10},
                                                                                {"16KB", 16 << 10},
                                                                                {"64KB", 64 << 10},
                                                                                {"256KB", 256 << 10},
                                                                                {"1MB", 1 << 20},
                                                                                {"4MB", 4 << 20},
                                                                                {"16MB", 16 << 20},
                                                                                {"64MB", 64 << 20},
                                                                                {"256MB", 256 << 20}}) {
    rows.push_back({name, f32, f32, {bytes / 4}});
  }
  rows.push_back({"f16-16MB", DataType::kFloat16, DataType::kFloat16, {8 << 20}});
  rows.push_back({"bf16-16MB", DataType::kBFloat16, DataType::kBFloat16, {8 << 20}});
  rows.push_back({"f32as16-16MB", f32, DataType::kFloat16, {4 << 20}});
  rows.push_back({"f64-16MB", DataType::kFloat64, DataType::kFloat64, {2 << 20}});
  rows.push_back({"resnet50", f32, f32, resnet50()});
  rows.push_back({"gpt2", f32, f32, gpt2()});
  rows.push_back({"1000x1000", f32, f32, std::vector<int64_t>(1000, 1000)});
  rows.push_back({"10000x8", f32, f32, std::vector<int64_t>(10'000, 8)});
  rows.push_back({"bcast-4B", f32, f32, {1}, OpKind::kBroadcast});
  for (const auto& [name, count] : {std::pair{"adasum-4KB", 1 << 10}, std::pair{"adasum-64KB", 16 << 10},
                                    std::pair{"adasum-1MB", 1 << 18}, std::pair{"adasum-64MB", 16 << 20}}) {
    rows.push_back({name, f32, f32, {count}, OpKind::kAllreduce, ReduceOp::kAdasum});
  }
  rows.push_back({"adasum-resnet50", f32, f32, resnet50(), OpKind::kAllreduce, ReduceOp::kAdasum});
  for (const auto& [name, kind] : {std::pair{"gather", OpKind::kAllgather}, std::pair{"a2a", OpKind::kAlltoall},
                                   std::pair{"rs", OpKind::kReduceScatter}, std::pair{"bcast", OpKind::kBroadcast}}) {
    for (const auto& [size, bytes] :
         {std::pair{"4KB", 4 << 10}, std::pair{"16KB", 16 << 10}, std::pair{"64KB", 64 << 10},
          std::pair{"256KB", 256 << 10}, std::pair{"1MB", 1 << 20}, std::pair{"2MB", 2 << 20},
          std::pair{"4MB", 4 << 20}, std::pair{"8MB", 8 << 20}, std::pair{"16MB", 16 << 20},
          std::pair{"64MB", 64 << 20}}) {
      rows.push_back({std::string(name) + "-" + size, f32, f32, {bytes / 4}, kind});
    }
    rows.push_back({std::string(name) + "-1000x1000", f32, f32, std::vector<int64_t>(1000, 1000), kind});
  }
  return rows;
}

struct Settings {
  int ranks = 2;
  double seconds = 0.5;
  long spin_us = -1;
  int64_t chunk = 0;
  int64_t direct = 0;
  bool out_of_place = false;
  bool pin = false;  // rank r to core r, for numbers taken while the machine has other work
  std::vector<std::string> rows;
};

constexpr int kMaxIterations = 20'000;

// What the forked ranks share beside the region under test.
struct Board {
  std::atomic<uint32_t> arrived{0};
  std::atomic<uint32_t> stop{0};
};

// Starts the ranks of an iteration together; it is outside of what is measured. It spins only briefly, for a rank that
// has used up its time slice here would be descheduled in the middle of what follows.
void rendezvous(Board& board, int ranks, uint32_t& round) {
  ++round;
  board.arrived.fetch_add(1);
  const bool crowded = ranks > static_cast<int>(std::thread::hardware_concurrency());
  for (int looks = 0; board.arrived.load() < round * static_cast<uint32_t>(ranks); ++looks) {
    if (crowded || looks > 1000) std::this_thread::yield();
  }
}

class Rank {
 public:
  Rank(const Settings& settings, const Row& row, int rank, std::byte* region, Board* board, double* times)
      : settings_(settings), board_(board), times_(times), rank_(rank) {
    ShmOptions options;
    options.rank = rank;
    options.size = settings.ranks;
    options.chunk_bytes = settings.chunk;
    options.direct_bytes = settings.direct;
    options.spin = std::chrono::microseconds(
        settings.spin_us >= 0 ? settings.spin_us
                              : (settings.ranks > static_cast<int>(std::thread::hardware_concurrency()) ? 0 : 20));
    backend_ = make_shm_backend(region, options);
    bucket_.kind = row.kind;
    bucket_.op = row.op;
    bucket_.dtype = row.dtype;
    bucket_.wire = row.wire;
    const auto n = static_cast<size_t>(settings.ranks);
    for (const int64_t count : row.counts) {
      const size_t bytes = static_cast<size_t>(count) * size_of(row.dtype);
      const bool parts = row.kind == OpKind::kAlltoall || row.kind == OpKind::kReduceScatter;
      const int64_t share = parts ? count / settings.ranks : count;
      memory_.emplace_back(bytes, std::byte{0});
      copies_.emplace_back(row.kind == OpKind::kAllgather ? bytes * n : bytes, std::byte{1});
      const TensorView in = contiguous_view(memory_.back().data(), row.dtype, {parts ? share * settings.ranks : count});
      TensorView out = contiguous_view(copies_.back().data(), row.dtype, in.sizes);
      std::vector<int64_t> counts;
      if (row.kind == OpKind::kAllgather) out.sizes = {count * settings.ranks};
      if (row.kind == OpKind::kReduceScatter) out.sizes = {share};
      if (row.kind == OpKind::kAllgather || row.kind == OpKind::kReduceScatter) counts.assign(n, share);
      if (row.kind == OpKind::kAlltoall) counts.assign(n * n, share);
      bucket_.segments.push_back({in, settings.out_of_place || !counts.empty() ? out : in, counts});
      bucket_.elements += in.numel();
    }
  }

  // Odd iterations are memcpy, even ones the collective.
  void run() {
    const auto end = Clock::now() + std::chrono::duration<double>(settings_.seconds);
    uint32_t round = 0;
    for (int i = 0; i < kMaxIterations; ++i) {
      // Rank 0 ends it; a barrier lies between its decision and everybody's look at it.
      if (rank_ == 0 && i >= 10 && Clock::now() > end) board_->stop = 1;
      rendezvous(*board_, settings_.ranks, round);
      if (board_->stop.load() != 0) break;
      rendezvous(*board_, settings_.ranks, round);
      const auto begin = Clock::now();
      if (i % 2 == 0) {
        backend_->run(bucket_);
      } else {
        for (size_t t = 0; t < memory_.size(); ++t) {
          std::memcpy(copies_[t].data(), memory_[t].data(), memory_[t].size());
        }
      }
      times_[i] = std::chrono::duration<double>(Clock::now() - begin).count();
    }
  }

 private:
  const Settings& settings_;
  Board* board_;
  double* times_;
  int rank_;
  std::unique_ptr<Backend> backend_;
  Bucket bucket_;
  std::vector<std::vector<std::byte>> memory_;
  std::vector<std::vector<std::byte>> copies_;
};

std::byte* map_shared(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::perror("mmap"), std::exit(1);
  return static_cast<std::byte*>(memory);
}

void pin_to(size_t core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  if (sched_setaffinity(0, sizeof(set), &set) != 0) std::perror("sched_setaffinity");
}

void measure(const Settings& settings, const Row& row) {
  const auto ranks = static_cast<size_t>(settings.ranks);
  const size_t region_bytes = shm_region_bytes(settings.ranks);
  const size_t times_bytes = ranks * kMaxIterations * sizeof(double);
  std::byte* region = map_shared(region_bytes);
  auto* board = new (map_shared(sizeof(Board))) Board;
  auto* times = reinterpret_cast<double*>(map_shared(times_bytes));
  std::fflush(stdout);
  for (size_t rank = 0; rank < ranks; ++rank) {
    if (fork() != 0) continue;
    if (settings.pin) pin_to(rank % std::thread::hardware_concurrency());
    Rank(settings, row, static_cast<int>(rank), region, board, times + rank * kMaxIterations).run();
    _exit(0);
  }
  bool failed = false;
  for (size_t rank = 0; rank < ranks; ++rank) {
    int status = 0;
    wait(&status);
    failed |= status != 0;
  }
  std::vector<double> slowest[2];
  for (int i = 2; i < kMaxIterations && times[i] > 0; ++i) {  // the first pair touches the pages
    double worst = 0;
    for (size_t rank = 0; rank < ranks; ++rank)
      worst = std::max(worst, times[rank * kMaxIterations + static_cast<size_t>(i)]);
    slowest[i % 2].push_back(worst * 1e3);
  }
  for (auto& times_of : slowest) std::sort(times_of.begin(), times_of.end());
  const auto middle = [](const std::vector<double>& sorted) { return sorted[sorted.size() / 2]; };
  std::printf("%-13s %10.4f %10.4f %10.4f %10.4f %7.2f %7.2f %7zu%s\n", row.name.c_str(), slowest[0].front(),
              middle(slowest[0]), slowest[1].front(), middle(slowest[1]), slowest[0].front() / slowest[1].front(),
              middle(slowest[0]) / middle(slowest[1]), slowest[0].size(), failed ? "  FAILED" : "");
  munmap(region, region_bytes);
  munmap(board, sizeof(Board));
  munmap(times, times_bytes);
}

Settings parse(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    const auto value = [&] { return i + 1 < argc ? argv[++i] : "0"; };
    if (word == "-n") {
      settings.ranks = std::atoi(value());
    } else if (word == "-t") {
      settings.seconds = std::atof(value());
    } else if (word == "--spin") {
      settings.spin_us = std::atol(value());
    } else if (word == "--chunk") {
      settings.chunk = std::atol(value());
    } else if (word == "--direct") {
      settings.direct = std::atol(value());
    } else if (word == "--out-of-place") {
      settings.out_of_place = true;
    } else if (word == "--pin") {
      settings.pin = true;
    } else {
      settings.rows.push_back(word);
    }
  }
  return settings;
}

}  // namespace
}  // namespace fusewire

int main(int argc, char** argv) {
  using namespace fusewire;
  const Settings settings = parse(argc, argv);
  std::printf("%d ranks on %u cores, kernels: %s\n", settings.ranks, std::thread::hardware_concurrency(),
              std::string(cpu_kernels().isa).c_str());
  std::printf("%-13s %10s %10s %10s %10s %7s %7s %7s\n", "", "min ms", "median ms", "memcpy min", "memcpy med", "x min",
              "x med", "runs");
  for (const Row& row : all_rows()) {
    const bool wanted =
        settings.rows.empty() || std::find(settings.rows.begin(), settings.rows.end(), row.name) != settings.rows.end();
    if (wanted) measure(settings, row);
  }
}
