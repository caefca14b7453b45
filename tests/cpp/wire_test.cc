// Messages survive the wire; nothing else gets through it.
#include "control/wire.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "control/unit.h"

namespace fusewire {
namespace {

using Bytes = std::vector<std::byte>;

UnitSpec full_spec() {
  UnitSpec spec;
  spec.kind = OpKind::kBroadcast;
  spec.op = ReduceOp::kMax;
  spec.prescale = -0.0;
  spec.postscale = 1e-300;
  spec.root = -3;
  spec.process_set = UINT32_MAX;
  spec.name = std::string("l\0yer", 5);
  spec.tensors = {{DataType::kComplex128, DataType::kFloat16, DeviceType::kCuda, {2, 0, int64_t{1} << 40}},
                  {DataType::kUInt8, DataType::kUInt8, DeviceType::kCpu, {}}};
  spec.ranks = {0, 7, INT32_MAX};
  return spec;
}

UnitSpec open_spec() {
  UnitSpec spec;
  spec.kind = OpKind::kAllgather;
  spec.name = "rows";
  spec.tensors = {{DataType::kFloat32, DataType::kFloat32, DeviceType::kCpu, {-1, 0, 3}}};
  return spec;
}

RequestList full_requests() {
  RequestList message;
  message.acked = UINT64_MAX;
  message.completed = {1, 2, UINT64_MAX - 1};
  for (const CacheId id : {CacheId{5}, CacheId{6}, CacheId{2}, kNoCacheId - 1, CacheId{0}}) {
    message.requests.emplace_back().id = id;
  }
  message.requests[1].absent = std::vector<bool>(19, true);
  message.requests[1].absent[4] = false;
  message.requests[2].extents = {0, 7, INT64_MAX};
  Request& request = message.requests.emplace_back();
  request.spec = std::make_unique<UnitSpec>(full_spec());
  request.absent = {true, false};
  request.extents = {1};
  message.requests.emplace_back().spec = std::make_unique<UnitSpec>(open_spec());
  message.failure = ResponseError{1, "", ErrorCode::kCollective, 3, "the data plane of rank 3 failed"};
  message.activity = "it sleeps";
  return message;
}

ResponseList full_responses() {
  ResponseList message;
  message.sequence = 12345678901234567u;
  message.evicted = {9, 3, kNoCacheId - 1};
  ResponseBucket& bucket = message.buckets.emplace_back();
  bucket.bucket = 77;
  bucket.process_set = 3;
  bucket.units = {{4, ""}, {5, ""}, {17, "fresh"}, {kNoCacheId, "never cached"}, {0, ""}};
  bucket.units[1].extents = {3, 0, INT64_MAX};
  bucket.units[2].extents = {0};
  bucket.skipped = {{0, 1}, {2, 0}, {2, 99}};
  message.buckets.emplace_back().skip = true;
  message.buckets.back().units = {{1, ""}, {2, ""}};
  message.buckets.back().described = {open_spec(), full_spec()};
  message.errors.push_back({2, "x", ErrorCode::kTensorMismatch, -1, "allreduce 'x': shape differs"});
  message.fatal = ResponseError{0, "", ErrorCode::kPeerLost, 3, "rank 3 was lost"};
  message.probed = {2, 0, 300};
  return message;
}

void expect_equal(const ResponseError& a, const ResponseError& b) {
  EXPECT_EQ(a.process_set, b.process_set);
  EXPECT_EQ(a.name, b.name);
  EXPECT_EQ(a.code, b.code);
  EXPECT_EQ(a.rank, b.rank);
  EXPECT_EQ(a.message, b.message);
}

void expect_equal(const RequestList& a, const RequestList& b) {
  EXPECT_EQ(a.acked, b.acked);
  EXPECT_EQ(a.completed, b.completed);
  ASSERT_EQ(a.requests.size(), b.requests.size());
  for (size_t i = 0; i < a.requests.size(); ++i) {
    EXPECT_EQ(a.requests[i].id, b.requests[i].id);
    EXPECT_EQ(a.requests[i].absent, b.requests[i].absent);
    EXPECT_EQ(a.requests[i].extents, b.requests[i].extents);
    ASSERT_EQ(a.requests[i].spec != nullptr, b.requests[i].spec != nullptr);
    if (a.requests[i].spec) {
      EXPECT_EQ(*a.requests[i].spec, *b.requests[i].spec);
    }
  }
  ASSERT_EQ(a.failure.has_value(), b.failure.has_value());
  if (a.failure) expect_equal(*a.failure, *b.failure);
  EXPECT_EQ(a.activity, b.activity);
}

TEST(Wire, RequestsRoundTrip) {
  const RequestList message = full_requests();
  expect_equal(decode_requests(encode(message)), message);
  expect_equal(decode_requests(encode(RequestList{})), RequestList{});
}

TEST(Wire, ResponsesRoundTrip) {
  const ResponseList message = full_responses();
  const ResponseList copy = decode_responses(encode(message));
  EXPECT_EQ(copy.sequence, message.sequence);
  EXPECT_EQ(copy.evicted, message.evicted);
  ASSERT_EQ(copy.buckets.size(), message.buckets.size());
  for (size_t i = 0; i < copy.buckets.size(); ++i) {
    EXPECT_EQ(copy.buckets[i].bucket, message.buckets[i].bucket);
    EXPECT_EQ(copy.buckets[i].process_set, message.buckets[i].process_set);
    EXPECT_EQ(copy.buckets[i].skip, message.buckets[i].skip);
    EXPECT_EQ(copy.buckets[i].skipped, message.buckets[i].skipped);
    EXPECT_EQ(copy.buckets[i].described, message.buckets[i].described);
    ASSERT_EQ(copy.buckets[i].units.size(), message.buckets[i].units.size());
    for (size_t j = 0; j < copy.buckets[i].units.size(); ++j) {
      EXPECT_EQ(copy.buckets[i].units[j].id, message.buckets[i].units[j].id);
      EXPECT_EQ(copy.buckets[i].units[j].name, message.buckets[i].units[j].name);
      EXPECT_EQ(copy.buckets[i].units[j].extents, message.buckets[i].units[j].extents);
    }
  }
  ASSERT_EQ(copy.errors.size(), 1u);
  expect_equal(copy.errors.front(), message.errors.front());
  ASSERT_TRUE(copy.fatal);
  expect_equal(*copy.fatal, *message.fatal);
  EXPECT_EQ(copy.probed, message.probed);
}

TEST(Wire, AnActivityThatIsTooLongIsRefused) {
  RequestList message;
  message.activity = std::string(kLongestActivity + 1, 'x');
  EXPECT_THROW(decode_requests(encode(message)), Error);
}

TEST(Wire, SpecialScalesSurvive) {
  for (const double scale : {0.0, -0.0, std::numeric_limits<double>::infinity(), std::nan(""), 0.1}) {
    RequestList message;
    message.requests.emplace_back().spec = std::make_unique<UnitSpec>(full_spec());
    message.requests.front().spec->prescale = scale;
    const RequestList copy = decode_requests(encode(message));
    EXPECT_EQ(std::bit_cast<uint64_t>(copy.requests.front().spec->prescale), std::bit_cast<uint64_t>(scale));
    EXPECT_TRUE(agree(*copy.requests.front().spec, *message.requests.front().spec));
  }
}

TEST(Wire, AscendingIdsTakeAByteEach) {
  RequestList requests;
  ResponseList responses;
  responses.buckets.emplace_back();
  for (CacheId id = 1000; id < 2000; ++id) {
    requests.requests.emplace_back().id = id;
    responses.buckets.front().units.push_back({id, ""});
  }
  EXPECT_LT(encode(requests).size(), 1010u);
  EXPECT_LT(encode(responses).size(), 1020u);
}

// Either a message or Error(kInvalidArgument); sanitizers see to the rest.
template <typename Decode>
bool accepts(const Bytes& frame, Decode decode) {
  try {
    decode(frame);
    return true;
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInvalidArgument);
    return false;
  }
}
bool accepts_any(const Bytes& frame) {
  const bool requests = accepts(frame, decode_requests);
  const bool responses = accepts(frame, decode_responses);
  EXPECT_FALSE(requests && responses);
  return requests || responses;
}

TEST(Wire, EveryTruncationIsRefused) {
  for (const Bytes& whole : {encode(full_requests()), encode(full_responses())}) {
    EXPECT_TRUE(accepts_any(whole));
    for (size_t size = 0; size < whole.size(); ++size) {
      EXPECT_FALSE(accepts_any({whole.begin(), whole.begin() + static_cast<ptrdiff_t>(size)})) << size;
    }
    Bytes longer = whole;
    longer.push_back(std::byte{0});
    EXPECT_FALSE(accepts_any(longer));
  }
}

TEST(Wire, EveryFlippedBitIsRefusedOrMeansSomething) {
  for (const Bytes& whole : {encode(full_requests()), encode(full_responses())}) {
    size_t refused = 0;
    for (size_t bit = 0; bit < whole.size() * 8; ++bit) {
      Bytes flipped = whole;
      flipped[bit / 8] ^= std::byte{1} << (bit % 8);
      refused += accepts_any(flipped) ? 0 : 1;
    }
    EXPECT_GT(refused, whole.size());
  }
}

TEST(Wire, RandomBytes) {
  std::mt19937 random(3);
  for (int round = 0; round < 20'000; ++round) {
    Bytes frame(random() % 64);
    // Mostly small numbers, which get further than large ones.
    for (std::byte& b : frame) b = static_cast<std::byte>(random() % (random() % 4 == 0 ? 256 : 8));
    if (!frame.empty()) frame[0] = static_cast<std::byte>(round % 2 == 0 ? 'Q' : 'R');
    accepts_any(frame);
  }
}

TEST(Wire, RandomDamage) {
  std::mt19937 random(4);
  for (const Bytes& whole : {encode(full_requests()), encode(full_responses())}) {
    for (int round = 0; round < 5'000; ++round) {
      Bytes frame = whole;
      for (unsigned n = random() % 4; n-- > 0;) frame[random() % frame.size()] = static_cast<std::byte>(random());
      const auto at = frame.begin() + static_cast<ptrdiff_t>(random() % frame.size());
      if (random() % 3 == 0) frame.erase(at, at + static_cast<ptrdiff_t>(random() % (frame.end() - at)));
      if (random() % 3 == 0) frame.insert(frame.begin(), whole.begin(), whole.begin() + 3);
      accepts_any(frame);
    }
  }
}

Bytes frame_of(std::initializer_list<int> values) {
  Bytes frame;
  for (const int value : values) frame.push_back(static_cast<std::byte>(value));
  return frame;
}

TEST(Wire, HostileCounts) {
  EXPECT_TRUE(accepts_any(frame_of({'Q', 0, 0, 0, 0})));
  EXPECT_FALSE(accepts_any(frame_of({'Q', 0, 0, 2, 0, 0})));
  // 2^63 completions, requests, absent bits.
  const std::initializer_list<int> huge = {0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f};
  for (const auto& prefix : {frame_of({'Q', 0}), frame_of({'Q', 0, 0}), frame_of({'Q', 0, 0, 1, 2}), frame_of({'R', 0}),
                             frame_of({'R', 0, 0})}) {
    Bytes frame = prefix;
    const Bytes count = frame_of(huge);
    frame.insert(frame.end(), count.begin(), count.end());
    EXPECT_FALSE(accepts_any(frame));
  }
  // A string that is longer than what follows its length by just the length's own byte.
  EXPECT_FALSE(accepts_any(frame_of({'R', 0, 0, 0, 1, 0, 5, 'n', 'a', 'm', 'e'})));
  // A number of more than 64 bits.
  EXPECT_FALSE(accepts_any(frame_of({'Q', 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 2, 0, 0, 0})));
  EXPECT_TRUE(accepts_any(frame_of({'Q', 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 1, 0, 0, 0})));
  // Ids below zero and beyond the last.
  EXPECT_TRUE(accepts_any(frame_of({'Q', 0, 0, 1, 0, 0})));
  EXPECT_FALSE(accepts_any(frame_of({'Q', 0, 0, 1, 8, 0})));
  EXPECT_FALSE(accepts_any(frame_of({'R', 0, 1, 0xff, 0xff, 0xff, 0xff, 0x1f, 0, 0, 0})));
}

TEST(Wire, DescriptionsAreOfUnitsOrThereAreNone) {
  ResponseList message;
  message.buckets.emplace_back().units = {{1, ""}, {2, ""}};
  message.buckets.back().described = {open_spec()};
  EXPECT_FALSE(accepts_any(encode(message)));
  message.buckets.back().described.push_back(full_spec());
  EXPECT_TRUE(accepts_any(encode(message)));
}

TEST(Wire, OnlyTheFirstDimensionOfSomeKindsMayBeOpen) {
  const auto accepted = [](OpKind kind, Dims shape) {
    UnitSpec spec = open_spec();
    spec.kind = kind;
    spec.tensors.front().shape = std::move(shape);
    RequestList message;
    message.requests.emplace_back().spec = std::make_unique<UnitSpec>(spec);
    return accepts_any(encode(message));
  };
  for (const OpKind kind : {OpKind::kAllgather, OpKind::kAlltoall}) {
    EXPECT_TRUE(accepted(kind, {-1}));
    EXPECT_FALSE(accepted(kind, {}));
    EXPECT_FALSE(accepted(kind, {3}));
    EXPECT_FALSE(accepted(kind, {-1, -1}));
    EXPECT_FALSE(accepted(kind, {-1, int64_t{1} << 62}));
  }
  EXPECT_FALSE(accepted(OpKind::kAllreduce, {-1}));
  EXPECT_TRUE(accepted(OpKind::kAllreduce, {}));
  EXPECT_FALSE(accepted(OpKind::kReduceScatter, {}));
  EXPECT_TRUE(accepted(OpKind::kReduceScatter, {0}));
}

TEST(Wire, TensorsTooLargeForAnyMemoryAreRefused) {
  for (const auto& [shape, fine] : std::vector<std::pair<Dims, bool>>{{{int64_t{1} << 60}, true},
                                                                      {{int64_t{1} << 61}, false},
                                                                      {{int64_t{1} << 31, int64_t{1} << 31}, false},
                                                                      {{0, INT64_MAX}, true},
                                                                      {{INT64_MAX}, false}}) {
    RequestList message;
    UnitSpec spec;
    spec.name = "x";
    spec.tensors.push_back({DataType::kFloat32, DataType::kFloat32, DeviceType::kCpu, shape});
    message.requests.emplace_back().spec = std::make_unique<UnitSpec>(spec);
    EXPECT_EQ(accepts_any(encode(message)), fine) << to_string(shape);
  }
}

}  // namespace
}  // namespace fusewire
