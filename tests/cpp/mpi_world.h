// Ranks of one MPI job as threads over the double.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "collective/mpi/mpi_backend.h"
#include "mpi_double.h"

namespace fusewire::testing {

// A rank's side of the job: its MPI, its process, its backend of the global set.
struct MpiRank {
  MpiRank(MpiFabric& fabric, int rank)
      : mpi(fabric, fabric.mpi_ranks.empty() ? rank : fabric.mpi_ranks[rank_index(rank)]), process(mpi) {}
  static size_t rank_index(int rank) { return static_cast<size_t>(rank); }

  void join(int rank, int size, std::chrono::nanoseconds abort_after = {}) {
    job = std::make_shared<MpiJob>(process, rank, size, abort_after);
  }

  MpiDouble mpi;
  MpiProcess process;
  std::shared_ptr<MpiJob> job;
  std::unique_ptr<Backend> backend;
};

class MpiWorld {
 public:
  // `prepare` is called for every rank before it starts.
  explicit MpiWorld(int size, const std::function<void(MpiDouble&)>& prepare = {}, std::vector<int> mpi_ranks = {})
      : fabric(size) {
    fabric.mpi_ranks = std::move(mpi_ranks);
    for (int rank = 0; rank < size; ++rank) {
      ranks.push_back(std::make_unique<MpiRank>(fabric, rank));
      if (prepare) prepare(ranks.back()->mpi);
    }
  }

  int size() const { return fabric.size; }

  // A body returns "" or what went wrong on its rank; run on a thread per rank. What it throws is the text.
  using Body = std::function<std::string(int rank, MpiRank&)>;
  std::vector<std::string> on_ranks(const Body& body) {
    std::vector<std::string> faults(ranks.size());
    std::vector<std::thread> threads;
    for (int rank = 0; rank < size(); ++rank) {
      threads.emplace_back([&, rank] {
        const auto r = static_cast<size_t>(rank);
        try {
          faults[r] = body(rank, *ranks[r]);
        } catch (const std::exception& error) {
          faults[r] = std::string("threw ") + error.what();
        }
        if (!faults[r].empty()) StopWord(stop).stop(ErrorCode::kPeerLost, -1);  // the others need not wait
      });
    }
    for (std::thread& thread : threads) thread.join();
    return faults;
  }

  // The same with a backend of the global set on every rank. "" when every rank was content.
  std::string with_backends(MpiOptions options, const std::function<std::string(int, Backend&)>& body) {
    const auto faults = on_ranks([&](int rank, MpiRank& self) {
      start(rank, self, options);
      return body(rank, *self.backend);
    });
    std::string text;
    for (size_t r = 0; r < faults.size(); ++r) {
      if (!faults[r].empty()) text += "rank " + std::to_string(r) + ": " + faults[r] + "\n";
    }
    return text;
  }

  void start(int rank, MpiRank& self, MpiOptions options = {}) {
    self.join(rank, size());
    options.rank = rank;
    options.ranks.resize(static_cast<size_t>(size()));
    for (int r = 0; r < size(); ++r) options.ranks[static_cast<size_t>(r)] = r;
    self.backend = make_mpi_backend(self.job, options, StopWord(stop));
  }

  MpiFabric fabric;
  std::vector<std::unique_ptr<MpiRank>> ranks;
  std::atomic<uint32_t> stop{0};
};

}  // namespace fusewire::testing
