// Ranks as threads of one process: engines over the in-process fabric, and short ways to submit to them.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/engine.h"

namespace fusewire::testing {

// Calls `body(rank)` on n threads and rethrows the first exception after all have ended.
inline void on_ranks(int n, const std::function<void(int)>& body) {
  std::vector<std::exception_ptr> errors(static_cast<size_t>(n));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < n; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        body(rank);
      } catch (...) {
        errors[static_cast<size_t>(rank)] = std::current_exception();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::exception_ptr& error : errors) {
    if (error) std::rethrow_exception(error);
  }
}

inline std::vector<std::unique_ptr<Engine>> make_engines(int n, const Config& config = {}) {
  std::vector<std::unique_ptr<Engine>> engines;
  for (auto& endpoint : make_in_process_fabric(n))
    engines.push_back(std::make_unique<Engine>(std::move(endpoint), config));
  return engines;
}

// n engines, each used by its own thread; all are shut down at the end.
inline void with_engines(int n, const std::function<void(Engine&)>& body, const Config& config = {}) {
  auto engines = make_engines(n, config);
  on_ranks(n, [&](int rank) { body(*engines[static_cast<size_t>(rank)]); });
  on_ranks(n, [&](int rank) { engines[static_cast<size_t>(rank)]->shutdown(true, "test ended"); });
}

inline SubmittedTensor in_place(std::vector<float>& values) {
  SubmittedTensor tensor;
  tensor.input = contiguous_view(values.data(), DataType::kFloat32, {static_cast<int64_t>(values.size())});
  tensor.output = tensor.input;
  return tensor;
}

inline Submission allreduce(std::string name, std::vector<float>& values, ReduceOp op = ReduceOp::kSum) {
  Submission submission;
  submission.op = op;
  submission.name = std::move(name);
  submission.tensors.push_back(in_place(values));
  return submission;
}

// The Error that `call` throws; fails the test when it throws none.
inline Error error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error;
  }
  ADD_FAILURE() << "no error was raised";
  return Error(ErrorCode::kInternal, "no error was raised");
}

}  // namespace fusewire::testing
