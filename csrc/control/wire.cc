#include "control/wire.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <string>
#include <string_view>
#include <utility>

#include "control/unit.h"

namespace fusewire {
namespace {

// Layout. Integers are varints (7 bits a byte, low ones first; signed ones folded so that small magnitudes stay short),
// lists and strings start with their length. Cache ids are coded as the distance from the id to be expected, one more
// than the last, so ids in ascending order take one byte each.
//
//   RequestList    'Q', acked, completed[], requests[], head: 1 = a failure follows, 2 = the activity
//   Request        head, then: the absent bits where head has 2 set; extents[] where it has 4 set; the
//                  description where it has 1 set, else the distance of the id is head / 8
//   ResponseList   'R', sequence, evicted[], buckets[], errors[], head: 1 = a fatal one follows, 2 = probed[]
//   ResponseUnit   head: 1 = a name follows, 2 = there is an id, and its distance is head / 8, 4 = extents[] follow
//   dimensions     one more than they are: the first may be -1

constexpr uint8_t kRequestTag = 'Q';
constexpr uint8_t kResponseTag = 'R';
constexpr uint64_t kHasDescription = 1;
constexpr uint64_t kHasAbsentBits = 2;
constexpr uint64_t kHasName = 1;
constexpr uint64_t kHasId = 2;
constexpr uint64_t kHasExtents = 4;
constexpr uint64_t kHasError = 1;
constexpr uint64_t kHasProbe = 2;
constexpr int kDistanceShift = 3;

constexpr uint64_t fold(int64_t value) {
  return (static_cast<uint64_t>(value) << 1) ^ static_cast<uint64_t>(value >> 63);
}
constexpr int64_t unfold(uint64_t value) { return static_cast<int64_t>((value >> 1) ^ (~(value & 1) + 1)); }

[[noreturn]] void malformed(std::string_view what) {
  throw Error(ErrorCode::kInvalidArgument, "malformed control message: " + std::string(what));
}

// The id to be expected next, on both sides.
class IdPredictor {
 public:
  uint64_t distance(CacheId id) {
    const uint64_t folded = fold(static_cast<int64_t>(id) - expected_);
    expected_ = static_cast<int64_t>(id) + 1;
    return folded;
  }
  CacheId id(uint64_t folded) {
    const int64_t id = folded > kFarthest ? -1 : expected_ + unfold(folded);
    if (id < 0 || id >= static_cast<int64_t>(kNoCacheId)) malformed("cache id out of range");
    expected_ = id + 1;
    return static_cast<CacheId>(id);
  }

 private:
  static constexpr uint64_t kFarthest = uint64_t{1} << 34;  // keeps the sum from overflowing
  int64_t expected_ = 0;
};

// ---------------------------------------------------------------------------------------------------------------------

class Writer {
 public:
  Writer(uint8_t tag, size_t expected_size) {
    bytes_.reserve(expected_size);
    byte(tag);
  }

  void byte(uint8_t value) { bytes_.push_back(std::byte{value}); }
  template <typename Enum>
  void enumerator(Enum value) {
    byte(static_cast<uint8_t>(value));
  }
  void number(uint64_t value) {
    for (; value >= 0x80; value >>= 7) byte(static_cast<uint8_t>(value) | 0x80);
    byte(static_cast<uint8_t>(value));
  }
  void integer(int64_t value) { number(fold(value)); }
  void real(double value) {
    const auto bits = std::bit_cast<uint64_t>(value);
    for (int shift = 0; shift < 64; shift += 8) byte(static_cast<uint8_t>(bits >> shift));
  }
  void text(const std::string& value) {
    number(value.size());
    const auto* data = reinterpret_cast<const std::byte*>(value.data());
    bytes_.insert(bytes_.end(), data, data + value.size());
  }
  void bits(const std::vector<bool>& value) {
    number(value.size());
    for (size_t i = 0; i < value.size(); i += 8) {
      uint8_t packed = 0;
      for (size_t j = 0; j < 8 && i + j < value.size(); ++j) packed |= static_cast<uint8_t>(value[i + j] << j);
      byte(packed);
    }
  }
  template <typename T, typename WriteOne>
  void list(const std::vector<T>& values, WriteOne write_one) {
    number(values.size());
    for (const T& value : values) write_one(value);
  }

  std::vector<std::byte> take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

class Reader {
 public:
  Reader(std::span<const std::byte> frame, uint8_t tag) : next_(frame.data()), end_(frame.data() + frame.size()) {
    if (byte() != tag) malformed("unexpected kind");
  }

  void finish() const {
    if (left() != 0) malformed("trailing bytes");
  }

  uint8_t byte() {
    if (next_ == end_) malformed("it ends too early");
    return std::to_integer<uint8_t>(*next_++);
  }
  bool flag() { return enumerator<uint8_t>(2) == 1; }
  template <typename Enum>
  Enum enumerator(int count) {
    const uint8_t value = byte();
    if (value >= count) malformed("value out of range");
    return static_cast<Enum>(value);
  }
  uint64_t number(uint64_t largest = std::numeric_limits<uint64_t>::max()) {
    uint64_t value = byte();
    if (value >= 0x80) {
      value &= 0x7f;
      for (int shift = 7;; shift += 7) {
        const uint64_t next = byte();
        if (shift == 63 && next > 1) malformed("number too long");
        value |= (next & 0x7f) << shift;
        if (next < 0x80) break;
      }
    }
    if (value > largest) malformed("number out of range");
    return value;
  }
  uint32_t number32() { return static_cast<uint32_t>(number(std::numeric_limits<uint32_t>::max())); }
  int32_t integer32() {
    const int64_t value = unfold(number());
    if (value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max()) {
      malformed("number out of range");
    }
    return static_cast<int32_t>(value);
  }
  double real() {
    uint64_t bits = 0;
    for (int shift = 0; shift < 64; shift += 8) bits |= uint64_t{byte()} << shift;
    return std::bit_cast<double>(bits);
  }
  std::string text() {
    const size_t size = number();
    if (size > left()) malformed("it ends too early");
    const auto* data = reinterpret_cast<const char*>(next_);
    next_ += size;
    return {data, size};
  }
  std::vector<bool> bits() {
    const uint64_t count = number();
    if (count > left() * uint64_t{8}) malformed("it ends too early");
    std::vector<bool> value(count);
    uint8_t packed = 0;
    for (size_t i = 0; i < count; ++i) {
      if (i % 8 == 0) packed = byte();
      value[i] = ((packed >> (i % 8)) & 1) != 0;
    }
    return value;
  }
  // Every element takes at least one byte, so memory stays in proportion to the frame.
  template <typename ReadOne>
  auto list(ReadOne read_one) {
    std::vector<decltype(read_one())> values;
    const size_t count = number();
    if (count > left()) malformed("it ends too early");
    values.reserve(count);
    for (size_t i = 0; i < count; ++i) values.push_back(read_one());
    return values;
  }

 private:
  size_t left() const { return static_cast<size_t>(end_ - next_); }
  const std::byte* next_;
  const std::byte* end_;
};

// ---------------------------------------------------------------------------------------------------------------------

void write_spec(Writer& writer, const UnitSpec& spec) {
  writer.enumerator(spec.kind);
  writer.enumerator(spec.op);
  writer.real(spec.prescale);
  writer.real(spec.postscale);
  writer.integer(spec.root);
  writer.number(spec.process_set);
  writer.text(spec.name);
  writer.list(spec.tensors, [&](const TensorSpec& tensor) {
    writer.enumerator(tensor.dtype);
    writer.enumerator(tensor.wire);
    writer.enumerator(tensor.device);
    writer.list(tensor.shape, [&](int64_t dim) { writer.number(static_cast<uint64_t>(dim) + 1); });
  });
  writer.list(spec.ranks, [&](int32_t rank) { writer.integer(rank); });
}

constexpr uint64_t kLargest = std::numeric_limits<int64_t>::max();

void write_extents(Writer& writer, const std::vector<int64_t>& extents) {
  writer.list(extents, [&](int64_t extent) { writer.number(static_cast<uint64_t>(extent)); });
}

std::vector<int64_t> read_extents(Reader& reader) {
  return reader.list([&] { return static_cast<int64_t>(reader.number(kLargest)); });
}

TensorSpec read_tensor(Reader& reader) {
  TensorSpec tensor;
  tensor.dtype = reader.enumerator<DataType>(kDataTypeCount);
  tensor.wire = reader.enumerator<DataType>(kDataTypeCount);
  tensor.device = reader.enumerator<DeviceType>(2);
  tensor.shape = reader.list([&] { return static_cast<int64_t>(reader.number(kLargest + 1) - 1); });
  return tensor;
}

UnitSpec read_spec(Reader& reader) {
  UnitSpec spec;
  spec.kind = reader.enumerator<OpKind>(kOpKindCount);
  spec.op = reader.enumerator<ReduceOp>(kReduceOpCount);
  spec.prescale = reader.real();
  spec.postscale = reader.real();
  spec.root = reader.integer32();
  spec.process_set = reader.number32();
  spec.name = reader.text();
  if (spec.name.empty()) malformed("a description without a name");
  spec.tensors = reader.list([&] { return read_tensor(reader); });
  spec.ranks = reader.list([&] { return reader.integer32(); });
  if (const std::string flaw = flaw_of(spec); !flaw.empty()) malformed(flaw);
  return spec;
}

void write_error(Writer& writer, const ResponseError& error) {
  writer.number(error.process_set);
  writer.text(error.name);
  writer.enumerator(error.code);
  writer.integer(error.rank);
  writer.text(error.message);
}

ResponseError read_error(Reader& reader) {
  ResponseError error;
  error.process_set = reader.number32();
  error.name = reader.text();
  error.code = reader.enumerator<ErrorCode>(kErrorCodeCount);
  error.rank = reader.integer32();
  error.message = reader.text();
  return error;
}

ResponseUnit read_unit(Reader& reader, IdPredictor& ids) {
  ResponseUnit unit;
  const uint64_t head = reader.number();
  if ((head & kHasId) != 0) unit.id = ids.id(head >> kDistanceShift);
  if ((head & kHasName) != 0) unit.name = reader.text();
  if ((head & kHasExtents) != 0) unit.extents = read_extents(reader);
  if (unit.name.empty() && ((head & kHasName) != 0 || unit.id == kNoCacheId)) malformed("a unit without a name");
  return unit;
}

ResponseBucket read_bucket(Reader& reader, IdPredictor& ids) {
  ResponseBucket bucket;
  bucket.bucket = reader.number();
  bucket.process_set = reader.number32();
  bucket.skip = reader.flag();
  bucket.units = reader.list([&] { return read_unit(reader, ids); });
  bucket.skipped = reader.list([&] {
    const uint32_t unit = reader.number32();
    if (unit >= bucket.units.size()) malformed("a skipped tensor of no unit");
    return std::pair<uint32_t, uint32_t>(unit, reader.number32());
  });
  bucket.described = reader.list([&] { return read_spec(reader); });
  if (!bucket.described.empty() && bucket.described.size() != bucket.units.size()) {
    malformed("descriptions that do not fit");
  }
  return bucket;
}

}  // namespace

std::vector<std::byte> encode(const RequestList& message) {
  Writer writer(kRequestTag, 64 + message.requests.size() * 2);
  writer.number(message.acked);
  writer.list(message.completed, [&](uint64_t bucket) { writer.number(bucket); });
  IdPredictor ids;
  writer.list(message.requests, [&](const Request& request) {
    const uint64_t flags = (request.spec ? kHasDescription : 0) | (request.absent.empty() ? 0 : kHasAbsentBits) |
                           (request.extents.empty() ? 0 : kHasExtents);
    writer.number(flags | (request.spec ? 0 : ids.distance(request.id) << kDistanceShift));
    if (!request.absent.empty()) writer.bits(request.absent);
    if (!request.extents.empty()) write_extents(writer, request.extents);
    if (request.spec) write_spec(writer, *request.spec);
  });
  writer.number((message.failure ? kHasError : 0) | (message.activity ? kHasProbe : 0));
  if (message.failure) write_error(writer, *message.failure);
  if (message.activity) writer.text(*message.activity);
  return writer.take();
}

RequestList decode_requests(std::span<const std::byte> frame) {
  Reader reader(frame, kRequestTag);
  RequestList message;
  message.acked = reader.number();
  message.completed = reader.list([&] { return reader.number(); });
  IdPredictor ids;
  message.requests = reader.list([&] {
    Request request;
    const uint64_t head = reader.number();
    if ((head & kHasAbsentBits) != 0) request.absent = reader.bits();
    if ((head & kHasExtents) != 0) request.extents = read_extents(reader);
    if ((head & kHasDescription) != 0) {
      request.spec = std::make_unique<UnitSpec>(read_spec(reader));
      if (!request.absent.empty() && request.absent.size() != request.spec->tensors.size()) {
        malformed("absent bits that do not fit");
      }
    } else {
      request.id = ids.id(head >> kDistanceShift);
    }
    return request;
  });
  const uint64_t rest = reader.number(kHasError | kHasProbe);
  if ((rest & kHasError) != 0) message.failure = read_error(reader);
  if ((rest & kHasProbe) != 0) {
    message.activity = reader.text();
    if (message.activity->size() > kLongestActivity) malformed("a text that is too long");
  }
  reader.finish();
  return message;
}

std::vector<std::byte> encode(const ResponseList& message) {
  size_t units = 0;
  for (const ResponseBucket& bucket : message.buckets) units += bucket.units.size();
  Writer writer(kResponseTag, 64 + units * 2);
  writer.number(message.sequence);
  IdPredictor evicted;
  writer.list(message.evicted, [&](CacheId id) { writer.number(evicted.distance(id)); });
  IdPredictor ids;
  writer.list(message.buckets, [&](const ResponseBucket& bucket) {
    writer.number(bucket.bucket);
    writer.number(bucket.process_set);
    writer.byte(bucket.skip ? 1 : 0);
    writer.list(bucket.units, [&](const ResponseUnit& unit) {
      const uint64_t flags = (unit.name.empty() ? 0 : kHasName) | (unit.id == kNoCacheId ? 0 : kHasId) |
                             (unit.extents.empty() ? 0 : kHasExtents);
      writer.number(flags | (unit.id == kNoCacheId ? 0 : ids.distance(unit.id) << kDistanceShift));
      if (!unit.name.empty()) writer.text(unit.name);
      if (!unit.extents.empty()) write_extents(writer, unit.extents);
    });
    writer.list(bucket.skipped, [&](const std::pair<uint32_t, uint32_t>& place) {
      writer.number(place.first);
      writer.number(place.second);
    });
    writer.list(bucket.described, [&](const UnitSpec& spec) { write_spec(writer, spec); });
  });
  writer.list(message.errors, [&](const ResponseError& error) { write_error(writer, error); });
  writer.number((message.fatal ? kHasError : 0) | (message.probed.empty() ? 0 : kHasProbe));
  if (message.fatal) write_error(writer, *message.fatal);
  if (!message.probed.empty()) writer.list(message.probed, [&](int32_t rank) { writer.integer(rank); });
  return writer.take();
}

ResponseList decode_responses(std::span<const std::byte> frame) {
  Reader reader(frame, kResponseTag);
  ResponseList message;
  message.sequence = reader.number();
  IdPredictor evicted;
  message.evicted = reader.list([&] { return evicted.id(reader.number()); });
  IdPredictor ids;
  message.buckets = reader.list([&] { return read_bucket(reader, ids); });
  message.errors = reader.list([&] { return read_error(reader); });
  const uint64_t rest = reader.number(kHasError | kHasProbe);
  if ((rest & kHasError) != 0) message.fatal = read_error(reader);
  if ((rest & kHasProbe) != 0) message.probed = reader.list([&] { return reader.integer32(); });
  reader.finish();
  return message;
}

}  // namespace fusewire
