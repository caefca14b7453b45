#include "engine/plane_source.h"

#include <array>
#include <string>
#include <utility>

#include "collective/mpi/mpi_backend.h"
#include "collective/mpi/mpi_loader.h"
#include "common/error.h"

namespace fusewire {
namespace {

// A set's part of the host's shared data area. Ids are never reused, so neither is a region, and a fresh one is zero.
SharedMapping map_region(Endpoint& endpoint, const PlaneSet& set, size_t bytes) {
  return endpoint.map_shared(set.id * static_cast<uint64_t>(shm_region_bytes(endpoint.size())), bytes);
}

// A plane together with the mapping that it lives in.
class MappedBackend : public Backend {
 public:
  MappedBackend(SharedMapping mapping, std::unique_ptr<Backend> inner)
      : mapping_(std::move(mapping)), inner_(std::move(inner)) {}
  std::string_view name() const override { return inner_->name(); }
  void run(const Bucket& bucket) override { inner_->run(bucket); }
  void abort() noexcept override { inner_->abort(); }
  void check() override { inner_->check(); }
  std::vector<int> laggards() const override { return inner_->laggards(); }

 private:
  const SharedMapping mapping_;  // outlives inner_
  const std::unique_ptr<Backend> inner_;
};

// A set that this rank is not in.
class ForeignPlane final : public Backend {
 public:
  ForeignPlane(SharedMapping mapping, std::function<void(std::byte*)> stop)
      : mapping_(std::move(mapping)), stop_(std::move(stop)) {}
  std::string_view name() const override { return "foreign"; }
  void run(const Bucket&) override { throw Error(ErrorCode::kInternal, "this rank is not in the process set"); }
  void abort() noexcept override { stop_(mapping_.data); }
  void check() override {}
  std::vector<int> laggards() const override { return {}; }

 private:
  const SharedMapping mapping_;
  const std::function<void(std::byte*)> stop_;
};

// ---- shared memory ----

class ShmSource final : public PlaneSource {
 public:
  explicit ShmSource(const PlaneContext& context) : endpoint_(context.endpoint), options_(context.shm) {}
  std::string_view name() const override { return "shm"; }

  std::unique_ptr<Backend> make(const PlaneSet& set, int rank) override {
    ShmOptions options = options_;
    options.rank = rank;
    options.size = static_cast<int>(set.ranks.size());
    SharedMapping mapping = map_region(endpoint_, set, shm_region_bytes(options.size));
    auto inner = make_shm_backend(mapping.data, options);
    return std::make_unique<MappedBackend>(std::move(mapping), std::move(inner));
  }

  std::unique_ptr<Backend> make_foreign(const PlaneSet& set) override {
    const int size = static_cast<int>(set.ranks.size());
    return std::make_unique<ForeignPlane>(map_region(endpoint_, set, shm_region_bytes(size)),
                                          [size](std::byte* region) { shm_stop(region, size); });
  }

 private:
  Endpoint& endpoint_;
  const ShmOptions options_;
};

// ---- MPI ----

class MpiSource final : public PlaneSource {
 public:
  explicit MpiSource(const PlaneContext& context) : endpoint_(context.endpoint), job_(start(context)) {
    options_.spin = context.shm.spin;
    options_.abort_after = context.shm.abort_after;
  }
  std::string_view name() const override { return "mpi"; }

  std::unique_ptr<Backend> make(const PlaneSet& set, int rank) override {
    MpiOptions options = options_;
    options.ranks = set.ranks;
    options.rank = rank;
    options.process_set = set.id;
    SharedMapping mapping = map_region(endpoint_, set, kStopPage);
    auto inner = make_mpi_backend(job_, options, stop_word(mapping.data));
    return std::make_unique<MappedBackend>(std::move(mapping), std::move(inner));
  }

  std::unique_ptr<Backend> make_foreign(const PlaneSet& set) override {
    return std::make_unique<ForeignPlane>(map_region(endpoint_, set, kStopPage),
                                          [](std::byte* region) { stop_word(region).stop(ErrorCode::kPeerLost, -1); });
  }

 private:
  // All that MPI ranks of one host share: the word that ends a wait for a message that will never come.
  static constexpr size_t kStopPage = 4096;
  static StopWord stop_word(std::byte* region) { return StopWord(*reinterpret_cast<std::atomic<uint32_t>*>(region)); }

  static std::shared_ptr<MpiJob> start(const PlaneContext& context) {
    MpiProcess& process = mpi_process(context.config.mpi_module);
    auto job =
        std::make_shared<MpiJob>(process, context.endpoint.rank(), context.endpoint.size(), context.shm.abort_after);
    if (process.one_thread() && context.endpoint.rank() == 0) {
      context.logger.warning("this MPI gives " + to_string(process.threads()) +
                             ", not MPI_THREAD_MULTIPLE: one thread of Fusewire makes all MPI calls, and the script "
                             "must make none while operations are pending");
    }
    return job;
  }

  Endpoint& endpoint_;
  MpiOptions options_;
  const std::shared_ptr<MpiJob> job_;
};

// ---- the table ----

// Best first. `works`: whether it can serve this job at all, before it is tried.
struct PlaneKind {
  std::string_view name;
  DeviceType device;
  bool (*works)(const PlaneContext&);
  std::unique_ptr<PlaneSource> (*make)(const PlaneContext&);
};

template <typename Source>
std::unique_ptr<PlaneSource> make_source(const PlaneContext& context) {
  return std::make_unique<Source>(context);
}

constexpr std::array<PlaneKind, 2> kKinds = {{
    // Every endpoint there is connects the ranks of one host.
    {"shm", DeviceType::kCpu, [](const PlaneContext&) { return true; }, make_source<ShmSource>},
    // A job of one rank needs no messages, hence no MPI.
    {"mpi", DeviceType::kCpu, [](const PlaneContext& c) { return c.endpoint.size() > 1; }, make_source<MpiSource>},
}};

}  // namespace

std::unique_ptr<PlaneSource> make_plane_source(DeviceType device, const PlaneContext& context) {
  const PlaneKind* first = nullptr;
  for (const PlaneKind& kind : kKinds) {
    if (kind.device != device || !kind.works(context)) continue;
    if (kind.name == context.config.backend) return kind.make(context);
    if (first == nullptr) first = &kind;
  }
  if (first == nullptr) {
    throw Error(ErrorCode::kInvalidArgument, "no data plane serves tensors on " + std::string(to_string(device)));
  }
  return first->make(context);
}

}  // namespace fusewire
