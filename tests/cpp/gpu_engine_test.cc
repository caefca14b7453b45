// CUDA tensors through the engine, ranks as threads with a GPU each. That nobody touches memory too early or too late
// is what the doubles of the GPUs find out (RankGpu, GpuRanks): in every test, whatever else it looks at.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <iterator>
#include <numeric>
#include <random>

#include "gpu_engines.h"

namespace fusewire::testing {
namespace {

// A plane without results, for tests of what is around it: its work stays on the GPU until somebody lets it go on.
struct Scripted {
  std::atomic<int> fails_in_run{-1};    // this rank of the job
  std::atomic<int> breaks_cuda{-1};     // the same, after the launch
  std::atomic<int> fails_in_check{-1};  // the same, in check()
  std::atomic<bool> holds{true};        // work waits for let_go() or abort()
  std::atomic<int> made{0};             // planes
  std::atomic<int> aborted{0};
  std::atomic<int> destroyed{0};
};

class ScriptedPlane final : public Backend {
 public:
  ScriptedPlane(Scripted& script, std::shared_ptr<GpuDevice> device, int rank, Backend& cpu)
      : script_(script), device_(std::move(device)), rank_(rank), cpu_(cpu) {
    ++script_.made;
  }
  ~ScriptedPlane() override { ++script_.destroyed; }
  std::string_view name() const override { return "scripted"; }
  void run(const Bucket& bucket) override {
    if (rank_ == script_.fails_in_run) throw Error(ErrorCode::kCollective, "the GPU is on fire");
    if (script_.holds) cuda().hold(device_->stream(), true);
    std::vector<CudaDouble::Use> uses;
    for (const Segment& segment : bucket.segments) {
      if (rank_ == script_.breaks_cuda) break;  // nothing can tell then when the memory is free
      uses.push_back({segment.input.data, static_cast<size_t>(segment.input.numel()) * sizeof(float), true});
    }
    cuda().launch("the collective", device_->stream(), std::move(uses), nullptr);
    cuda().broken = rank_ == script_.breaks_cuda;
  }
  void abort() noexcept override {
    if (!stopped_.exchange(true)) ++script_.aborted;
    let_go(*device_);
  }
  void check() override {
    if (rank_ == script_.fails_in_check) throw Error(ErrorCode::kCollective, "the link is down");
    cpu_.check();
  }
  std::vector<int> laggards() const override { return {}; }

  static void let_go(GpuDevice& device) {
    auto& cuda = dynamic_cast<LiveCuda&>(device.api());
    cuda.hold(device.stream(), false);
    cuda.poke();
  }

 private:
  LiveCuda& cuda() const { return dynamic_cast<LiveCuda&>(device_->api()); }

  Scripted& script_;
  const std::shared_ptr<GpuDevice> device_;
  const int rank_;
  Backend& cpu_;
  std::atomic<bool> stopped_{false};
};

// Until `condition`, of what other threads do. There is nothing to sleep on for what an engine does inside.
void wait_until(const std::function<bool()>& condition) {
  while (!condition()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

// What an engine fails with once this tensor has been submitted: before it is launched here, or after.
Error failure_after(Engine& engine, const GpuTensor& values) {
  try {
    engine.wait(engine.submit(allreduce("x", values)));
  } catch (const Error&) {
  }
  wait_until([&] { return engine.failure() != nullptr; });
  return *engine.failure();
}

GpuPlaneMaker scripted(Scripted& script) {
  return [&script](const OpenGpu& gpu, const GpuPlaneOptions& options, Backend& cpu, std::string* why) {
    *why = "this is a test";
    return std::make_unique<ScriptedPlane>(script, gpu.device, options.job_rank, cpu);
  };
}

void barrier(Engine& engine) {
  Submission submission;
  submission.kind = OpKind::kBarrier;
  submission.name = "barrier";
  engine.wait(engine.submit(std::move(submission)));
}

class GpuEngineRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Sizes, GpuEngineRanks, ::testing::Values(1, 2, 3, 4, 8));

class GpuEnginePlanes : public ::testing::TestWithParam<std::tuple<int, bool>> {};
INSTANTIATE_TEST_SUITE_P(SizesAndNccl, GpuEnginePlanes,
                         ::testing::Combine(::testing::Values(1, 2, 3, 4, 8), ::testing::Bool()));

float rank_sum(int n) { return static_cast<float>(n * (n + 1)) / 2; }
std::vector<float> all(size_t count, float value) { return std::vector<float>(count, value); }

// Gradients in an order of its own on every rank, made on two streams; used without any wait on the host.
TEST_P(GpuEnginePlanes, AllreduceInAnyOrder) {
  const auto [n, nccl] = GetParam();
  const float sum = rank_sum(n);
  const std::string plane = nccl ? "nccl" : "staged";
  const uint64_t seeds = n > 4 ? 1 : 3;
  for (uint64_t seed = 1; seed <= seeds; ++seed) {
    with_gpu_engines(
        n,
        [&](Engine& engine, RankGpu& gpu) {
          std::mt19937 random(static_cast<unsigned>(engine.rank()) + static_cast<unsigned>(seed) * 100);
          std::vector<size_t> order(12);
          std::iota(order.begin(), order.end(), 0);
          for (int round = 0; round < 4; ++round) {
            std::shuffle(order.begin(), order.end(), random);
            std::vector<std::unique_ptr<GpuTensor>> tensors(order.size());
            std::vector<Handle> handles(order.size());
            for (const size_t i : order) {
              const auto value = static_cast<float>(static_cast<int>(i) * (engine.rank() + 1));
              tensors[i] =
                  std::make_unique<GpuTensor>(gpu, 5 + i * 300, value, random() % 2 == 0 ? gpu.backward : gpu.compute);
              handles[i] = engine.submit(allreduce("t" + std::to_string(i), *tensors[i]));
            }
            engine.wait_all(handles);
            for (size_t i = 0; i < order.size(); ++i) {
              ASSERT_TRUE(handles[i]->event());
              ASSERT_EQ(tensors[i]->read(handles[i]), all(5 + i * 300, static_cast<float>(i) * sum));
            }
          }
          EXPECT_EQ(engine.gpu_data_plane(), plane);
        },
        seed, {}, nccl);
  }
}

TEST_P(GpuEngineRanks, AverageOutOfPlace) {
  const int n = GetParam();
  with_gpu_engines(n, [&](Engine& engine, RankGpu& gpu) {
    const GpuTensor from(gpu, 1000, static_cast<float>(engine.rank() + 1), gpu.backward);
    const GpuTensor to(gpu, 1000, -1, gpu.compute);
    Submission submission = allreduce("x", from, ReduceOp::kAverage);
    submission.tensors.front().output = to.view();
    submission.keep_alive =
        std::make_shared<std::array<std::shared_ptr<void>, 2>>(std::array{from.owner(), to.owner()});
    const Handle handle = engine.submit(std::move(submission));
    engine.wait(handle);
    EXPECT_EQ(to.read(handle), all(1000, rank_sum(n) / static_cast<float>(n)));
    EXPECT_EQ(from.read(handle), all(1000, static_cast<float>(engine.rank() + 1)));
    std::string reason;
    EXPECT_EQ(engine.gpu_data_plane(&reason), "staged");
    EXPECT_EQ(reason, "rank 0 has no NCCL: this is a test");
  });
}

TEST_P(GpuEngineRanks, AGroupOfTensorsOnBothDevices) {
  const int n = GetParam();
  with_gpu_engines(n, [&](Engine& engine, RankGpu& gpu) {
    for (int round = 0; round < 5; ++round) {
      const auto mine = static_cast<float>(engine.rank() + 1);
      const GpuTensor a(gpu, 7, mine, gpu.backward);
      std::vector<float> b(3000, 10 * mine);
      const GpuTensor c(gpu, 2000, 100 * mine, gpu.compute);
      Submission group = allreduce("group", a);
      group.tensors.push_back(in_place(b));
      group.tensors.push_back(allreduce("", c).tensors.front());
      group.keep_alive = std::make_shared<std::array<std::shared_ptr<void>, 2>>(std::array{a.owner(), c.owner()});
      const Handle handle = engine.submit(std::move(group));
      engine.wait(handle);
      EXPECT_EQ(a.read(handle), all(7, rank_sum(n)));
      EXPECT_EQ(b, all(3000, 10 * rank_sum(n)));
      EXPECT_EQ(c.read(handle), all(2000, 100 * rank_sum(n)));
    }
  });
}

TEST_P(GpuEngineRanks, AllgatherMakesItsResultWhenRowsAreKnown) {
  const int n = GetParam();
  with_gpu_engines(n, [&](Engine& engine, RankGpu& gpu) {
    const auto rows = static_cast<size_t>(engine.rank() + 1);
    const GpuTensor from(gpu, rows, static_cast<float>(engine.rank()), gpu.backward);
    auto made = std::make_shared<std::unique_ptr<GpuTensor>>();
    Submission submission = allreduce("x", from);
    submission.kind = OpKind::kAllgather;
    submission.tensors.front().output = {};
    submission.allocate = [&gpu, made](size_t, const Dims& shape) {
      *made = std::make_unique<GpuTensor>(gpu, static_cast<size_t>(numel(shape)), -1.0F, gpu.device->stream());
      return (*made)->view();
    };
    const Handle handle = engine.submit(std::move(submission));
    engine.wait(handle);
    std::vector<float> expected;
    for (int rank = 0; rank < n; ++rank) expected.insert(expected.end(), static_cast<size_t>(rank + 1), rank);
    EXPECT_EQ((*made)->read(handle), expected);
  });
}

TEST(GpuEngine, AbsentRanksContributeNothingAndReceive) {
  with_gpu_engines(3, [](Engine& engine, RankGpu& gpu) {
    const GpuTensor values(gpu, 1000, 2, gpu.backward);
    Submission submission = allreduce("x", values);
    if (engine.rank() == 1) {
      submission.tensors.front().absent = true;
      submission.tensors.front().input.data = nullptr;
    }
    const Handle handle = engine.submit(std::move(submission));
    engine.wait(handle);
    EXPECT_EQ(values.read(handle), all(1000, 4));
  });
}

// Nobody waits, and what the handles kept alive goes when it may: the doubles would tell.
TEST(GpuEngine, DroppedHandlesKeepTheirTensorsUntilTheGpuIsDone) {
  for (uint64_t seed = 1; seed <= 5; ++seed) {
    with_gpu_engines(
        2,
        [](Engine& engine, RankGpu& gpu) {
          for (int i = 0; i < 100; ++i) {
            const GpuTensor values(gpu, 64, 1, i % 2 == 0 ? gpu.backward : gpu.compute);
            engine.submit(allreduce("x" + std::to_string(i), values));
          }
        },
        seed);
  }
}

TEST(GpuEngine, ARankThatHasJoinedTakesPartWithTheGpuThatItHas) {
  GpuRanks ranks(3, 7);
  ranks.run([](Engine& engine, RankGpu& gpu) {
    for (int step = 0; step < 4 * engine.rank(); ++step) {
      const GpuTensor values(gpu, 500, 1, gpu.backward);
      const Handle handle = engine.submit(allreduce("x", values));
      engine.wait(handle);
      EXPECT_EQ(values.read(handle), all(500, step < 4 ? 2 : 1));
    }
    Submission join;
    join.kind = OpKind::kJoin;
    engine.wait(engine.submit(std::move(join)));
    const GpuTensor values(gpu, 500, 1, gpu.backward);
    const Handle handle = engine.submit(allreduce("x", values));
    engine.wait(handle);
    EXPECT_EQ(values.read(handle), all(500, 3));
  });
  ranks.shut_down();
  EXPECT_EQ(ranks.gpus[0]->opened_with, std::vector<int>{-1});
  EXPECT_EQ(ranks.gpus[1]->opened_with, std::vector<int>{1});
}

uint32_t change_set(Engine& engine, OpKind kind, std::vector<int32_t> ranks, uint32_t set = 0) {
  Submission submission;
  submission.kind = kind;
  submission.name = "set" + std::to_string(ranks.size()) + std::to_string(set);
  submission.ranks = std::move(ranks);
  submission.process_set = set;
  const Handle handle = engine.submit(std::move(submission));
  engine.wait(handle);
  return handle->created_set();
}

TEST(GpuEngine, ProcessSetsThatOverlapAndGo) {
  for (uint64_t seed = 1; seed <= 3; ++seed) {
    with_gpu_engines(
        3,
        [](Engine& engine, RankGpu& gpu) {
          for (int life = 0; life < 2; ++life) {
            const uint32_t low = change_set(engine, OpKind::kAddProcessSet, {0, 1});
            const uint32_t high = change_set(engine, OpKind::kAddProcessSet, {1, 2}, 0);
            for (int round = 0; round < 10; ++round) {
              const GpuTensor a(gpu, 3000, static_cast<float>(engine.rank() + 1), gpu.backward);
              const GpuTensor b(gpu, 3000, static_cast<float>(engine.rank() + 1), gpu.compute);
              std::vector<Handle> handles;
              for (const uint32_t set : {low, high}) {
                if (set == low ? engine.rank() == 2 : engine.rank() == 0) continue;
                Submission submission = allreduce("x", set == low ? a : b);
                submission.process_set = set;
                handles.push_back(engine.submit(std::move(submission)));
              }
              if (round % 2 == 1) std::reverse(handles.begin(), handles.end());
              engine.wait_all(handles);
              if (round == 9) break;  // the sets go while their GPUs may be at work
              for (const Handle& handle : handles) ASSERT_TRUE(handle->event());
              if (engine.rank() != 2) {
                ASSERT_EQ(a.read(handles[handles.size() == 1 || round % 2 == 0 ? 0 : 1]), all(3000, 3));
              }
              if (engine.rank() != 0) {
                ASSERT_EQ(b.read(handles[handles.size() == 1 || round % 2 == 1 ? 0 : 1]), all(3000, 5));
              }
            }
            change_set(engine, OpKind::kRemoveProcessSet, {}, low);
            change_set(engine, OpKind::kRemoveProcessSet, {}, high);
          }
        },
        seed);
  }
}

TEST(GpuEngine, WithoutCudaTheSubmitterIsTold) {
  with_engines(1, [](Engine& engine) {
    std::vector<float> values(3);
    Submission submission = allreduce("x", values);
    submission.tensors.front().input.device = {DeviceType::kCuda, 0};
    const Error error = error_of([&] { engine.submit(std::move(submission)); });
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    EXPECT_NE(std::string(error.what()).find("no CUDA"), std::string::npos);
    EXPECT_EQ(engine.gpu_data_plane(), "");
    engine.wait(engine.submit(allreduce("x", values)));
  });
}

TEST(GpuEngine, OneRankUsesOneGpu) {
  with_gpu_engines(2, [](Engine& engine, RankGpu& gpu) {
    const GpuTensor values(gpu, 10, 1, gpu.compute);
    engine.wait(engine.submit(allreduce("x", values)));
    Submission submission = allreduce("y", values);
    submission.tensors.front().input.device.index = 5;
    const Error error = error_of([&] { engine.submit(std::move(submission)); });
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    const std::string used = "cuda:" + std::to_string(engine.rank());
    EXPECT_NE(std::string(error.what()).find(used), std::string::npos) << error.what();
    EXPECT_NE(std::string(error.what()).find("cuda:5"), std::string::npos) << error.what();
    engine.wait(engine.submit(allreduce("z", values)));
  });
}

// ---- what is around a plane ----

// A handle is done when the work is launched; what it keeps alive stays until that has ended.
TEST(GpuEngine, DoneIsNotReached) {
  Scripted script;
  GpuRanks ranks(2, 11, {}, scripted(script));
  ranks.run([](Engine& engine, RankGpu& gpu) {
    auto tensor = std::make_unique<GpuTensor>(gpu, 100, 1, gpu.backward);
    const std::weak_ptr<void> memory = tensor->owner();
    const Handle handle = engine.submit(allreduce("x", *tensor));
    tensor.reset();
    engine.wait(handle);
    EXPECT_TRUE(handle->done());
    EXPECT_FALSE(handle->reached());
    std::vector<float> other(3);  // gives the engine every chance to drop what it may
    engine.wait(engine.submit(allreduce("other", other)));
    EXPECT_FALSE(memory.expired());
    ScriptedPlane::let_go(*gpu.device);
    wait_until([&] {
      engine.wait(handle);
      return memory.expired();
    });
    EXPECT_TRUE(handle->reached());
  });
  ranks.shut_down();
  EXPECT_EQ(script.aborted, 0);
}

// The root counts a bucket as complete when its work has ended, so tensors gather while a GPU is busy.
TEST(GpuEngine, TensorsGatherWhileTheGpuIsBusy) {
  Scripted script;
  GpuRanks ranks(2, 12, {}, scripted(script));
  ranks.run([&](Engine& engine, RankGpu& gpu) {
    const GpuTensor values(gpu, 10, 1, gpu.backward);
    for (const char* name : {"first", "second"}) engine.wait(engine.submit(allreduce(name, values)));
    EXPECT_EQ(engine.stats().buckets(), 2u);
    std::vector<GpuTensor> more;
    std::vector<Handle> handles;
    for (int i = 0; i < 20; ++i) {
      more.emplace_back(gpu, 10, 1, gpu.backward);
      handles.push_back(engine.submit(allreduce("more" + std::to_string(i), more.back())));
    }
    // A CPU tensor's bucket is another one and would wait as well, so it is a barrier of the control plane's that says
    // that all ranks have submitted theirs.
    barrier(engine);
    for (const Handle& handle : handles) EXPECT_FALSE(handle->done());
    barrier(engine);
    script.holds = false;
    ScriptedPlane::let_go(*gpu.device);
    engine.wait_all(handles);
    EXPECT_LE(engine.stats().buckets(), 4u);
  });
  ranks.shut_down();
}

TEST(GpuEngine, APlaneThatThrowsIsTheSameErrorEverywhere) {
  Scripted script;
  script.fails_in_run = 1;
  GpuRanks ranks(3, 13, {}, scripted(script));
  std::vector<std::string> texts(3);
  ranks.run([&](Engine& engine, RankGpu& gpu) {
    const GpuTensor values(gpu, 10, 1, gpu.backward);
    const Error error = failure_after(engine, values);
    EXPECT_EQ(error.code(), ErrorCode::kCollective);
    texts[static_cast<size_t>(engine.rank())] = error.what();
  });
  EXPECT_NE(texts[0].find("on fire"), std::string::npos) << texts[0];
  EXPECT_EQ(texts[1], texts[0]);
  EXPECT_EQ(texts[2], texts[0]);
  wait_until([&] { return script.aborted == script.made; });
  ranks.shut_down();
}

TEST(GpuEngine, ACudaThatFailsAfterALaunch) {
  Scripted script;
  script.breaks_cuda = 1;
  script.holds = false;
  GpuRanks ranks(2, 22, {}, scripted(script));
  ranks.run([&](Engine& engine, RankGpu& gpu) {
    const GpuTensor values(gpu, 10, 1, gpu.backward);
    EXPECT_EQ(failure_after(engine, values).code(), ErrorCode::kCollective);
    gpu.cuda->drain();  // before the memory goes
  });
  ranks.shut_down();
}

TEST(GpuEngine, WhatFailsOnTheGpuIsNoticedWhileNobodyCalls) {
  Scripted script;
  script.fails_in_check = 0;
  GpuRanks ranks(2, 14, {}, scripted(script));
  ranks.run([&](Engine& engine, RankGpu& gpu) {
    const GpuTensor values(gpu, 10, 1, gpu.backward);
    const Error error = failure_after(engine, values);
    EXPECT_EQ(error.code(), ErrorCode::kCollective);
    EXPECT_NE(std::string(error.what()).find("the link is down"), std::string::npos) << error.what();
    EXPECT_EQ(error_of([&] { engine.submit(allreduce("y", values)); }).code(), ErrorCode::kCollective);
  });
  wait_until([&] { return script.aborted == script.made; });
  ranks.shut_down();
}

TEST(GpuEngine, WorkThatNeverEndsIsAStall) {
  Scripted script;
  Config config;
  config.stall_check_seconds = 0;
  config.stall_abort_seconds = 0.3;
  GpuRanks ranks(2, 15, config, scripted(script));
  ranks.run([&](Engine& engine, RankGpu& gpu) {
    const GpuTensor values(gpu, 10, 1, gpu.backward);
    const Error error = failure_after(engine, values);
    EXPECT_EQ(error.code(), ErrorCode::kStalled) << error.what();
  });
  wait_until([&] { return script.aborted == script.made; });
  ranks.shut_down();
}

TEST(GpuEngine, APeerThatDiesAbortsWhatIsOnTheGpu) {
  Scripted script;
  GpuRanks ranks(3, 16, {}, scripted(script));
  std::atomic<int> launched{0};
  ranks.run([&](Engine& engine, RankGpu& gpu) {
    const GpuTensor values(gpu, 10, 1, gpu.backward);
    engine.wait(engine.submit(allreduce("x", values)));
    ++launched;
    wait_until([&] { return launched == 3; });
    if (engine.rank() == 2) return engine.shutdown(false, "ZeroDivisionError: division by zero");
    wait_until([&] { return engine.failure() != nullptr; });
    EXPECT_EQ(engine.failure()->code(), ErrorCode::kPeerLost);
    EXPECT_EQ(engine.failure()->rank(), 2);
    EXPECT_NE(std::string(engine.failure()->what()).find("ZeroDivisionError"), std::string::npos);
  });
  wait_until([&] { return script.aborted == script.made; });
  ranks.shut_down();
}

TEST(GpuEngine, ShutdownWaitsForTheGpu) {
  Scripted script;
  GpuRanks ranks(2, 17, {}, scripted(script));
  ranks.run([&](Engine& engine, RankGpu& gpu) {
    auto tensor = std::make_unique<GpuTensor>(gpu, 10, 1, gpu.backward);
    const std::weak_ptr<void> memory = tensor->owner();
    const Handle handle = engine.submit(allreduce("x", *tensor));
    tensor.reset();
    engine.wait(handle);
    std::thread later([&] { ScriptedPlane::let_go(*gpu.device); });
    engine.shutdown(true, "done");
    EXPECT_TRUE(handle->reached());
    EXPECT_TRUE(memory.expired());
    later.join();
  });
  EXPECT_EQ(script.aborted, 0);
}

// ... but not for ever, and nothing is freed before the abort.
TEST(GpuEngine, ShutdownAbortsWhatDoesNotEnd) {
  Scripted script;
  GpuRanks ranks(2, 18, {}, scripted(script));
  std::atomic<int> launched{0};
  ranks.run([&](Engine& engine, RankGpu& gpu) {
    const GpuTensor values(gpu, 10, 1, gpu.backward);
    engine.wait(engine.submit(allreduce("x", values)));
    ++launched;
    wait_until([&] { return launched == 2; });
    engine.shutdown(false, "it must end now");
  });
  EXPECT_EQ(script.aborted, 2);
}

TEST(GpuEngine, TheTimelineHasTheTimeOnTheGpu) {
  const std::string path = ::testing::TempDir() + "gpu_timeline.json";
  Config config;
  config.timeline = path;
  with_gpu_engines(
      1,
      [](Engine& engine, RankGpu& gpu) {
        for (int i = 0; i < 3; ++i) {
          const GpuTensor values(gpu, 10, 1, gpu.backward);
          engine.wait(engine.submit(allreduce("x", values)));
        }
        EXPECT_EQ(engine.stats().gpu_buckets, 3u);
      },
      21, config);
  std::ifstream file(path);
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const auto count = [&text](const std::string& what) {
    size_t found = 0;
    for (size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++found;
    return found;
  };
  EXPECT_EQ(count("\"ph\":\"X\",\"pid\":0,\"tid\":2,"), 3u) << text;
  EXPECT_EQ(count("\"name\":\"GPU\""), 1u);
}

// The plane of a set that is removed lives as long as its work.
TEST(GpuEngine, ASetIsRemovedWhileItsWorkIsOnTheGpu) {
  Scripted script;
  GpuRanks ranks(2, 19, {}, scripted(script));
  ranks.run([&](Engine& engine, RankGpu& gpu) {
    const uint32_t set = change_set(engine, OpKind::kAddProcessSet, {0, 1});
    const GpuTensor values(gpu, 10, 1, gpu.backward);
    Submission submission = allreduce("x", values);
    submission.process_set = set;
    const Handle handle = engine.submit(std::move(submission));
    engine.wait(handle);
    change_set(engine, OpKind::kRemoveProcessSet, {}, set);
    EXPECT_EQ(script.destroyed, 0);
    barrier(engine);
    ScriptedPlane::let_go(*gpu.device);
    wait_until([&] { return script.destroyed == 2; });
    EXPECT_TRUE(handle->reached());
  });
  ranks.shut_down();
  EXPECT_EQ(script.aborted, 0);
}

TEST(GpuEngine, AGpuThatCannotBeOpenedFailsAllRanks) {
  GpuRanks ranks(3, 20);
  ranks.run([&](Engine& engine, RankGpu& gpu) {
    gpu.broken = engine.rank() == 1;
    const GpuTensor values(gpu, 10, 1, gpu.backward);
    const Error error = error_of([&] { engine.wait(engine.submit(allreduce("x", values))); });
    EXPECT_EQ(error.code(), ErrorCode::kCollective);
    EXPECT_EQ(error.rank(), 1);
    EXPECT_NE(std::string(error.what()).find("out of memory"), std::string::npos) << error.what();
  });
  ranks.shut_down();
}

}  // namespace
}  // namespace fusewire::testing
