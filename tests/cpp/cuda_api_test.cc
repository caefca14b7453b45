// The double of CudaApi: right programs give right results in every order, and each kind of missing wait is a mistake
// in every order.
#include <gtest/gtest.h>

#include <cstring>
#include <set>
#include <string>
#include <vector>

#include "kernels/device_plan.h"
#include "simt/cuda_double.h"

namespace fusewire::testing {
namespace {

constexpr size_t kCount = 600;
constexpr size_t kBytes = kCount * sizeof(float);

// pack on one stream, a copy to pinned memory on another, and back; `leave_out` names a wait that is forgotten.
struct Program {
  explicit Program(uint64_t seed, std::string leave_out = "") : cuda(seed), leave_out_(std::move(leave_out)) {}

  bool does(const char* name) const { return leave_out_ != name; }

  void run() {
    tensor = static_cast<float*>(cuda.allocate(kBytes));
    buffer = cuda.allocate(kBytes);
    staging = static_cast<float*>(cuda.allocate_pinned(kBytes));
    producer = cuda.create_stream();
    ours = cuda.create_stream();
    copies = cuda.create_stream();
    made = cuda.create_event(false);
    packed = cuda.create_event(false);
    arrived = cuda.create_event(false);
    returned = cuda.create_event(false);
    finished = cuda.create_event(false);

    TransferPlan plan(DataType::kFloat32, DataType::kFloat32);
    plan.add(contiguous_view(tensor, DataType::kFloat32, {static_cast<int64_t>(kCount)}), 0, kCount, 0);
    void* table = cuda.allocate_pinned(plan.table_bytes());
    plan.write(table);
    cuda.host_uses(table, plan.table_bytes(), true);
    TransferArgs args = plan.args(table);
    args.buffer = buffer;
    args.stream = ours;

    cuda.launch("the model", producer, {{tensor, kBytes, true}}, [this] {
      for (size_t i = 0; i < kCount; ++i) tensor[i] = static_cast<float>(i);
    });
    cuda.record(made, producer);
    if (does("wait for the gradient")) cuda.wait(ours, made);
    cuda.pack(args);
    cuda.record(packed, ours);
    if (does("wait for pack")) cuda.wait(copies, packed);
    cuda.copy(staging, buffer, kBytes, copies);
    cuda.record(arrived, copies);
    if (does("host waits")) cuda.synchronize(arrived);
    cuda.host_uses(staging, kBytes, true);
    if (does("host waits")) {
      for (size_t i = 0; i < kCount; ++i) staging[i] *= 3;
    }
    cuda.copy(buffer, staging, kBytes, copies);
    cuda.record(returned, copies);
    if (does("wait for the way back")) cuda.wait(ours, returned);
    cuda.unpack(args);
    cuda.record(finished, ours);
    if (does("the model waits")) cuda.wait(producer, finished);
    cuda.launch("the optimizer", producer, {{tensor, kBytes, true}}, [this] {
      for (size_t i = 0; i < kCount; ++i) tensor[i] += 1;
    });
    cuda.record(made, producer);
    if (does("wait before free")) {
      cuda.synchronize(made);
      cuda.synchronize(returned);
    }
    result.assign(kCount, 0.0f);
    if (does("wait before free")) std::memcpy(result.data(), tensor, kBytes);
    cuda.free_pinned(table);
    cuda.free(tensor);
    cuda.free(buffer);
    cuda.free_pinned(staging);
  }

  CudaDouble cuda;
  std::string leave_out_;
  float* tensor = nullptr;
  float* staging = nullptr;
  void* buffer = nullptr;
  CudaApi::Stream producer = nullptr, ours = nullptr, copies = nullptr;
  CudaApi::Event made = nullptr, packed = nullptr, arrived = nullptr, returned = nullptr, finished = nullptr;
  std::vector<float> result;
};

TEST(CudaDouble, ARightProgramIsRightInEveryOrder) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    Program program(seed);
    program.run();
    ASSERT_EQ(program.cuda.mistakes(), std::vector<std::string>{}) << seed;
    for (size_t i = 0; i < kCount; ++i) ASSERT_EQ(program.result[i], static_cast<float>(3 * i + 1));
  }
}

class MissingWait : public ::testing::TestWithParam<std::pair<const char*, const char*>> {};

TEST_P(MissingWait, IsAMistakeInEveryOrder) {
  for (uint64_t seed = 0; seed < 20; ++seed) {
    Program program(seed, GetParam().first);
    program.run();
    ASSERT_FALSE(program.cuda.mistakes().empty()) << seed;
    ASSERT_EQ(program.cuda.mistakes().front(), GetParam().second) << seed;
  }
}

INSTANTIATE_TEST_SUITE_P(
    , MissingWait,
    ::testing::Values(
        std::pair{"wait for the gradient",
                  "pack reads what the model writes, and nothing says that it is done with it"},
        std::pair{"wait for pack", "copy reads what pack writes, and nothing says that it is done with it"},
        std::pair{"host waits", "the host writes what copy writes, and nothing says that it is done with it"},
        std::pair{"wait for the way back", "unpack reads what copy writes, and nothing says that it is done with it"},
        std::pair{"the model waits",
                  "the optimizer writes what unpack writes, and nothing says that it is done with it"},
        std::pair{"wait before free", "free writes what unpack reads, and nothing says that it is done with it"}),
    [](const auto& info) {
      std::string name = info.param.first;
      for (char& c : name) c = c == ' ' ? '_' : c;
      return name;
    });

TEST(CudaDouble, WaitingForAnEventThatWasNeverRecordedIsAMistake) {
  CudaDouble cuda(1);
  cuda.wait(cuda.create_stream(), cuda.create_event(false));
  cuda.synchronize(cuda.create_event(false));
  EXPECT_EQ(cuda.mistakes().size(), 2u);
}

// An event stands for what was recorded last when the wait was asked for, not for what is recorded later.
TEST(CudaDouble, AnEventRecordedAgainLaterDoesNotHelpAnEarlierWait) {
  CudaDouble cuda(2);
  const auto first = cuda.create_stream();
  const auto second = cuda.create_stream();
  const auto event = cuda.create_event(false);
  int cell = 0;
  cuda.record(event, first);
  cuda.wait(second, event);
  cuda.launch("writer", first, {{&cell, sizeof(cell), true}}, [&] { cell = 1; });
  cuda.record(event, first);
  cuda.launch("reader", second, {{&cell, sizeof(cell), false}}, [] {});
  EXPECT_EQ(cuda.mistakes(),
            std::vector<std::string>{"reader reads what writer writes, and nothing says that it is done with it"});
}

TEST(CudaDouble, IndependentStreamsComeInAnyOrder) {
  std::set<std::string> orders;
  for (uint64_t seed = 0; seed < 30; ++seed) {
    CudaDouble cuda(seed);
    std::string order;
    const auto first = cuda.create_stream();
    const auto second = cuda.create_stream();
    for (const char c : {'a', 'b'}) cuda.launch("first", first, {}, [&order, c] { order += c; });
    for (const char c : {'x', 'y'}) cuda.launch("second", second, {}, [&order, c] { order += c; });
    cuda.drain();
    orders.insert(order);
    EXPECT_LT(order.find('a'), order.find('b'));
    EXPECT_LT(order.find('x'), order.find('y'));
  }
  EXPECT_GT(orders.size(), 2u);
}

TEST(CudaDouble, WhatTheHostHasSeenReachedIsDone) {
  CudaDouble cuda(3);
  const auto stream = cuda.create_stream();
  const auto event = cuda.create_event(false);
  void* memory = cuda.allocate(8);
  cuda.launch("writer", stream, {{memory, 8, true}}, [memory] { std::memset(memory, 1, 8); });
  cuda.record(event, stream);
  while (!cuda.reached(event)) {
  }
  cuda.host_uses(memory, 8, false);
  cuda.free(memory);
  EXPECT_EQ(cuda.mistakes(), std::vector<std::string>{});
  cuda.free(memory);
  EXPECT_EQ(cuda.mistakes().size(), 1u);
}

}  // namespace
}  // namespace fusewire::testing
