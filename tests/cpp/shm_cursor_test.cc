// The row of a bucket: pieces at the edges of segments, and rows beyond 2^31 elements.
#include <gtest/gtest.h>

#include "collective/bucket_cursor.h"
#include "common/error.h"

namespace fusewire {
namespace {

Bucket make_bucket(std::byte* base, const std::vector<int64_t>& counts) {
  Bucket bucket;
  bucket.dtype = bucket.wire = DataType::kUInt8;
  for (const int64_t count : counts) {
    const TensorView view = contiguous_view(base + bucket.elements, DataType::kUInt8, {count});
    bucket.segments.push_back({view, view});
    bucket.elements += count;
  }
  return bucket;
}

std::vector<std::pair<int64_t, int64_t>> pieces(BucketCursor& cursor, int64_t begin, int64_t end) {
  std::vector<std::pair<int64_t, int64_t>> found;
  cursor.for_each(begin, end,
                  [&](const BucketCursor::Piece& piece) { found.emplace_back(piece.in_offset, piece.count); });
  return found;
}

using Pieces = std::vector<std::pair<int64_t, int64_t>>;

TEST(BucketCursor, CutsAtSegmentEdgesAndSkipsEmptyOnes) {
  std::byte memory[64];
  const Bucket bucket = make_bucket(memory, {0, 5, 0, 0, 1, 10, 0});
  BucketCursor cursor;
  cursor.assign(bucket, {DataType::kUInt8, DataType::kUInt8});
  EXPECT_EQ(pieces(cursor, 0, 16), (Pieces{{0, 5}, {0, 1}, {0, 10}}));
  EXPECT_EQ(pieces(cursor, 4, 7), (Pieces{{4, 1}, {0, 1}, {0, 1}}));
  EXPECT_EQ(pieces(cursor, 15, 16), (Pieces{{9, 1}}));
  EXPECT_EQ(pieces(cursor, 5, 6), (Pieces{{0, 1}}));
  EXPECT_EQ(pieces(cursor, 0, 1), (Pieces{{0, 1}}));
  EXPECT_EQ(pieces(cursor, 3, 3), Pieces{});
  EXPECT_EQ(pieces(cursor, 16, 16), Pieces{});
}

TEST(BucketCursor, CountsBeyondThirtyOneBits) {
  std::byte memory[1];  // never touched: only positions are asked for
  const int64_t big = (int64_t{1} << 31) + 7;
  const Bucket bucket = make_bucket(memory, {3, big, 5});
  BucketCursor cursor;
  cursor.assign(bucket, {DataType::kUInt8, DataType::kUInt8});
  EXPECT_EQ(pieces(cursor, big, big + 8), (Pieces{{big - 3, 3}, {0, 5}}));
  int64_t covered = 0;
  for (int64_t begin = 0; begin < bucket.elements; begin += 1 << 20) {
    for (const auto& piece : pieces(cursor, begin, std::min<int64_t>(begin + (1 << 20), bucket.elements))) {
      covered += piece.second;
    }
  }
  EXPECT_EQ(covered, bucket.elements);
}

TEST(BucketCursor, RefusesBucketsThatContradictThemselves) {
  std::byte memory[64];
  BucketCursor cursor;
  const auto assign = [&](const Bucket& bucket) { cursor.assign(bucket, {DataType::kUInt8, DataType::kUInt8}); };
  Bucket sum = make_bucket(memory, {4, 4});
  sum.elements = 7;
  EXPECT_THROW(assign(sum), Error);
  Bucket sizes = make_bucket(memory, {4});
  sizes.segments[0].output = contiguous_view(memory, DataType::kUInt8, {3});
  EXPECT_THROW(assign(sizes), Error);
  Bucket types = make_bucket(memory, {4});
  types.segments[0].input.dtype = DataType::kInt8;
  EXPECT_THROW(assign(types), Error);
}

}  // namespace
}  // namespace fusewire
