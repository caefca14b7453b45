// Engines with a GPU each, ranks as threads, and tensors on those GPUs that are made and used on streams of their own.
#pragma once

#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "simt/cuda_double.h"
#include "simt/nccl_double.h"
#include "thread_ranks.h"

namespace fusewire::testing {

// A CudaDouble that gets on with its work while nobody calls it, as a GPU does.
class LiveCuda final : public CudaDouble {
 public:
  LiveCuda(uint64_t seed, std::shared_ptr<CudaWorld> world)
      : CudaDouble(seed, world), world_(std::move(world)), thread_([this] { run(); }) {}
  ~LiveCuda() override {
    stopping_ = true;
    world_->changed();
    thread_.join();
  }

  std::atomic<bool> broken{false};  // nothing can be recorded any more

  void record(Event event, Stream stream) override {
    if (broken) throw Error(ErrorCode::kCollective, "cudaEventRecord: an illegal memory access was encountered");
    CudaDouble::record(event, stream);
    world_->changed();
  }
  void poke() { world_->changed(); }

 private:
  void run() {
    for (;;) {
      const uint64_t changes = world_->changes();
      if (stopping_) return;
      drain();
      world_->wait(changes);
    }
  }

  const std::shared_ptr<CudaWorld> world_;  // of all GPUs of the test
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

// One rank's GPU. Its training code works on `compute`, gradients come from `backward`.
struct RankGpu {
  RankGpu(NcclFabric& fabric, uint64_t seed, int number)
      : cuda(std::make_shared<LiveCuda>(seed, fabric.world)),
        device(std::make_shared<GpuDevice>(cuda, number, cuda->create_stream())),
        compute(cuda->create_stream()),
        backward(cuda->create_stream()),
        nccl(fabric, *cuda) {
    cuda->gpu[0] = static_cast<unsigned char>(number + 1);
  }

  const std::shared_ptr<LiveCuda> cuda;
  const std::shared_ptr<GpuDevice> device;
  const CudaApi::Stream compute;
  const CudaApi::Stream backward;
  NcclDouble nccl;
  bool has_nccl = false;
  GpuPlaneMaker make_plane = make_gpu_plane;
  std::vector<int> opened_with;
  bool broken = false;

  GpuOpener opener() {
    return [this](int index) -> OpenGpu {
      opened_with.push_back(index);
      if (broken) throw Error(ErrorCode::kCollective, "out of memory");
      return {
          .device = device, .nccl = has_nccl ? &nccl : nullptr, .no_nccl = "this is a test", .make_plane = make_plane};
    };
  }
};

// floats on a GPU. The last owner frees the memory once it has been filled; that other work uses it is a mistake then.
class GpuTensor {
 public:
  // Filled with `value` by work on `stream`; read() and submissions come after that.
  GpuTensor(RankGpu& gpu, size_t count, float value, CudaApi::Stream stream)
      : gpu_(gpu), count_(count), data_(static_cast<float*>(gpu.cuda->allocate(bytes()))) {
    float* const data = data_;
    gpu.cuda->launch("the model", stream, {{data, bytes(), true}}, [=] { std::fill_n(data, count, value); });
    ready_ = gpu.device->mark(stream);
    memory_ = {data, [cuda = gpu.cuda, ready = ready_](void* memory) {
                 ready->synchronize();
                 cuda->free(memory);
               }};
  }

  float* data() const { return data_; }
  size_t bytes() const { return count_ * sizeof(float); }
  TensorView view() const {
    TensorView view = contiguous_view(data(), DataType::kFloat32, {static_cast<int64_t>(count_)});
    view.device = {DeviceType::kCuda, static_cast<int8_t>(gpu_.device->index())};
    view.ready_event = ready_->get();
    return view;
  }
  const std::shared_ptr<void>& owner() const { return memory_; }

  // As training code uses a result: its stream waits for the event, the host only for its own stream.
  std::vector<float> read(const Handle& after) const {
    if (after && after->event()) after->event()->hold_up(gpu_.compute);
    std::vector<float> values(count_);
    const float* const from = data();
    gpu_.cuda->launch("a reader", gpu_.compute, {{from, bytes(), false}},
                      [&values, from] { std::copy_n(from, values.size(), values.begin()); });
    gpu_.device->mark(gpu_.compute)->synchronize();
    return values;
  }

 private:
  RankGpu& gpu_;
  size_t count_;
  float* data_;
  SharedEvent ready_;
  std::shared_ptr<void> memory_;
};

inline Submission allreduce(std::string name, const GpuTensor& tensor, ReduceOp op = ReduceOp::kSum) {
  Submission submission;
  submission.op = op;
  submission.name = std::move(name);
  SubmittedTensor& only = submission.tensors.emplace_back();
  only.input = only.output = tensor.view();
  submission.keep_alive = tensor.owner();
  return submission;
}

// n engines with their GPUs.
struct GpuRanks {
  explicit GpuRanks(int n, uint64_t seed, const Config& config = {}, const GpuPlaneMaker& make_plane = make_gpu_plane) {
    int rank = 0;
    for (auto& endpoint : make_in_process_fabric(n)) {
      gpus.push_back(std::make_unique<RankGpu>(fabric, seed * 16 + static_cast<uint64_t>(rank), rank));
      gpus.back()->make_plane = make_plane;
      engines.push_back(std::make_unique<Engine>(std::move(endpoint), config, gpus.back()->opener()));
      ++rank;
    }
  }
  ~GpuRanks() {
    engines.clear();
    for (const auto& gpu : gpus) EXPECT_EQ(gpu->cuda->mistakes(), std::vector<std::string>());
    EXPECT_EQ(fabric.mistakes(), std::vector<std::string>());
  }

  int size() const { return static_cast<int>(engines.size()); }
  void run(const std::function<void(Engine&, RankGpu&)>& body) {
    on_ranks(size(), [&](int rank) { body(*engines[static_cast<size_t>(rank)], *gpus[static_cast<size_t>(rank)]); });
  }
  void shut_down() {
    on_ranks(size(), [&](int rank) { engines[static_cast<size_t>(rank)]->shutdown(true, "test ended"); });
  }

  NcclFabric fabric;
  std::vector<std::unique_ptr<RankGpu>> gpus;
  std::vector<std::unique_ptr<Engine>> engines;
};

inline void with_gpu_engines(int n, const std::function<void(Engine&, RankGpu&)>& body, uint64_t seed = 1,
                             const Config& config = {}, bool nccl = false) {
  GpuRanks ranks(n, seed, config);
  for (const auto& gpu : ranks.gpus) gpu->has_nccl = nccl;
  ranks.run(body);
  ranks.shut_down();
}

}  // namespace fusewire::testing
