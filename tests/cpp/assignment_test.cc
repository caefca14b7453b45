// From the answers of the control plane to what a data plane is told.
#include "engine/assignment.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace fusewire {
namespace {

using Counts = std::vector<int64_t>;

// Ranks 2, 5 and 7 of a job, seen from rank 5.
std::shared_ptr<Plane> make_plane() {
  auto plane = std::make_shared<Plane>();
  plane->ranks = {2, 5, 7};
  return plane;
}

InFlight make_unit(OpKind kind, std::vector<Dims> inputs) {
  InFlight unit;
  unit.kind = kind;
  for (Dims& sizes : inputs) {
    unit.tensors.emplace_back().input = contiguous_view(nullptr, DataType::kFloat32, std::move(sizes));
  }
  unit.handle = std::make_shared<HandleState>();
  return unit;
}

Assignment assign(InFlight unit, Counts extents, std::vector<bool> skipped = {}) {
  Work work;
  work.units.emplace_back().extents = std::move(extents);
  work.units.back().skipped = std::move(skipped);
  std::vector<InFlight> units;
  units.push_back(std::move(unit));
  return make_assignment(work, units, make_plane(), 5);
}

struct Made {
  Allocator allocate = [this](size_t index, const Dims& shape) {
    shapes.emplace_back(index, shape);
    return contiguous_view(&memory, DataType::kFloat32, shape);
  };
  std::vector<std::pair<size_t, Dims>> shapes;
  float memory = 0;
};

TEST(Assignment, AllgatherOfAGroup) {
  Made made;
  InFlight unit = make_unit(OpKind::kAllgather, {{4, 3}, {0, 2, 2}});
  unit.allocate = &made.allocate;
  const Assignment assignment = assign(std::move(unit), {1, 10, 4, 0, 0, 5});
  ASSERT_EQ(assignment.parts.size(), 1u);
  const auto& segments = assignment.parts.front().segments;
  ASSERT_EQ(segments.size(), 2u);
  EXPECT_EQ(segments[0].counts, (Counts{3, 12, 0}));
  EXPECT_EQ(segments[1].counts, (Counts{40, 0, 20}));
  EXPECT_EQ(made.shapes, (std::vector<std::pair<size_t, Dims>>{{0, {5, 3}}, {1, {15, 2, 2}}}));
  EXPECT_EQ(segments[0].output.data, &made.memory);
  EXPECT_EQ(assignment.units.front().result.extents, (Counts{1, 4, 0, 10, 0, 5}));
  EXPECT_EQ(assignment.bytes, (15 + 60) * 4);
  EXPECT_FALSE(assignment.failure);
}

TEST(Assignment, AlltoallOfAGroup) {
  Made made;
  InFlight unit = make_unit(OpKind::kAlltoall, {{6, 2}, {1}});
  unit.allocate = &made.allocate;
  const Assignment assignment = assign(std::move(unit), {0, 1, 2, 9, 9, 9, 1, 2, 3, 0, 1, 0, 7, 8, 9, 4, 5, 6});
  const auto& segments = assignment.parts.front().segments;
  EXPECT_EQ(segments[0].counts, (Counts{0, 2, 4, 2, 4, 6, 14, 16, 18}));
  EXPECT_EQ(segments[1].counts, (Counts{9, 9, 9, 0, 1, 0, 4, 5, 6}));
  EXPECT_EQ(made.shapes, (std::vector<std::pair<size_t, Dims>>{{0, {11, 2}}, {1, {15}}}));
  EXPECT_EQ(assignment.units.front().result.extents, (Counts{1, 2, 8, 9, 1, 5}));
}

TEST(Assignment, ReduceScatterGivesEarlierMembersOneRowMore) {
  const Assignment assignment = assign(make_unit(OpKind::kReduceScatter, {{5, 2}, {1}, {0, 3}}), {});
  const auto& segments = assignment.parts.front().segments;
  EXPECT_EQ(segments[0].counts, (Counts{4, 4, 2}));
  EXPECT_EQ(segments[1].counts, (Counts{1, 0, 0}));
  EXPECT_EQ(segments[2].counts, (Counts{0, 0, 0}));
}

TEST(Assignment, OthersHaveNoCounts) {
  InFlight unit = make_unit(OpKind::kBroadcast, {{5, 2}});
  unit.root = 7;
  const Assignment assignment = assign(std::move(unit), {});
  EXPECT_TRUE(assignment.parts.front().segments[0].counts.empty());
  EXPECT_EQ(assignment.parts.front().root, 2);
}

TEST(Assignment, WhatNobodyHasIsMadeAllTheSame) {
  Made made;
  InFlight unit = make_unit(OpKind::kAllgather, {{0, 3}, {1, 2}});
  unit.allocate = &made.allocate;
  const Assignment assignment = assign(std::move(unit), {0, 2, 0, 1, 0, 0}, {true, false});
  EXPECT_EQ(made.shapes, (std::vector<std::pair<size_t, Dims>>{{0, {0, 3}}, {1, {3, 2}}}));
  EXPECT_EQ(assignment.parts.front().segments.size(), 1u);
  EXPECT_EQ(assignment.units.front().result.skipped, (std::vector<bool>{true, false}));
}

TEST(Assignment, NoMemoryForAResult) {
  const Allocator allocate = [](size_t, const Dims&) -> TensorView { throw std::runtime_error("out of memory"); };
  InFlight unit = make_unit(OpKind::kAllgather, {{1}});
  unit.allocate = &allocate;
  const Assignment assignment = assign(std::move(unit), {1, 1, 1});
  ASSERT_TRUE(assignment.failure);
  EXPECT_EQ(assignment.failure->code(), ErrorCode::kCollective);
  EXPECT_EQ(assignment.failure->rank(), 5);
  EXPECT_NE(std::string(assignment.failure->what()).find("out of memory"), std::string::npos);
  EXPECT_EQ(assignment.units.size(), 1u);
}

}  // namespace
}  // namespace fusewire
