// Broadcast: every root, every layout, single chunks and pipelines.
#include <gtest/gtest.h>

#include "shm_case.h"
#include "shm_world.h"

namespace fusewire::testing {
namespace {

class ShmBroadcast : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, ShmBroadcast, ::testing::Values(1, 2, 3, 5));

TEST_P(ShmBroadcast, RootsValuesEverywhere) {
  std::vector<Case> cases;
  for (int t = 0; t < kDataTypeCount; ++t) {
    for (int root = 0; root < GetParam(); ++root) {
      for (const bool mixed : {false, true}) {
        Case c;
        c.kind = OpKind::kBroadcast;
        c.size = GetParam();
        c.dtype = c.wire = static_cast<DataType>(t);
        c.root = root;
        c.shapes = {{1}, {}, {0, 4}, {999}, {30, 41}, {5000}};
        c.mixed = mixed;
        c.seed = static_cast<uint64_t>(cases.size() + 1);
        cases.push_back(c);
        c.shapes = {{mixed ? 3 : 1024}};
        cases.push_back(c);
      }
    }
  }
  const auto expected = expect_all(cases);
  const auto body = [&](int rank, Backend& backend) { return run_cases(cases, expected, rank, backend); };
  ShmOptions options;
  options.chunk_bytes = 1024;
  for (const int64_t direct_bytes : {0, 1}) {  // through slots, all of these are small; read from where they lie
    options.direct_bytes = direct_bytes;
    for (const int spin : {0, 20}) {
      options.spin = std::chrono::microseconds(spin);
      EXPECT_EQ(run_threads(GetParam(), options, body), "");
#if !defined(__SANITIZE_THREAD__)
      EXPECT_EQ(run_processes(GetParam(), options, body), "");
#endif
    }
  }
}

}  // namespace
}  // namespace fusewire::testing
