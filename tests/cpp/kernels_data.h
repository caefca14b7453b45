// Random elements of every dtype, and bitwise comparison in which every NaN equals every other.
#pragma once

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "common/types.h"
#include "kernels/element.h"
#include "kernels/kernels.h"

namespace fusewire::testing {

inline std::vector<DataType> all_types() {
  std::vector<DataType> types;
  for (int i = 0; i < kDataTypeCount; ++i) types.push_back(static_cast<DataType>(i));
  return types;
}

inline constexpr std::array<DataType, 4> kFloatingTypes = {DataType::kFloat16, DataType::kBFloat16, DataType::kFloat32,
                                                           DataType::kFloat64};
inline constexpr std::array<ReduceOp, 5> kOps = {ReduceOp::kSum, ReduceOp::kAverage, ReduceOp::kMin, ReduceOp::kMax,
                                                 ReduceOp::kProduct};

enum class Flavour { kOrdinary, kAnyBits, kHuge, kTiny };
inline constexpr std::array<Flavour, 4> kFlavours = {Flavour::kOrdinary, Flavour::kAnyBits, Flavour::kHuge,
                                                     Flavour::kTiny};

// The real type that a complex type is two of.
inline DataType real_type(DataType type) {
  if (type == DataType::kComplex64) return DataType::kFloat32;
  if (type == DataType::kComplex128) return DataType::kFloat64;
  return type;
}

inline double read_floating(DataType type, const void* from, size_t index) {
  switch (type) {
    case DataType::kFloat16:
      return element::to_double(element::load<element::Half>(from, index));
    case DataType::kBFloat16:
      return element::to_double(element::load<element::BFloat16>(from, index));
    case DataType::kFloat32:
      return element::load<float>(from, index);
    default:
      return element::load<double>(from, index);
  }
}

inline void write_floating(DataType type, void* to, size_t index, double value) {
  switch (type) {
    case DataType::kFloat16:
      return element::store(to, index, element::Convert<element::Half>::from(value));
    case DataType::kBFloat16:
      return element::store(to, index, element::Convert<element::BFloat16>::from(value));
    case DataType::kFloat32:
      return element::store(to, index, static_cast<float>(value));
    default:
      return element::store(to, index, value);
  }
}

inline double largest(DataType type) {
  switch (type) {
    case DataType::kFloat16:
      return 65504.0;
    case DataType::kBFloat16:
      return 0x1.fep127;
    case DataType::kFloat32:
      return 0x1.fffffep127;
    default:
      return 0x1.fffffffffffffp1023;
  }
}

inline double smallest_normal(DataType type) {
  return type == DataType::kFloat16 ? 0x1p-14 : type == DataType::kFloat64 ? 0x1p-1022 : 0x1p-126;
}

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}

  uint64_t bits() { return engine_(); }
  int64_t below(int64_t n) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n)); }
  double uniform() { return std::uniform_real_distribution<double>(-1, 1)(engine_); }

  // `count` elements of `type`.
  void fill(DataType type, Flavour flavour, void* to, size_t count) {
    if (type == DataType::kBool) {
      for (size_t i = 0; i < count; ++i) static_cast<uint8_t*>(to)[i] = bits() & 1;
      return;
    }
    const size_t parts = is_complex(type) ? 2 : 1;
    const DataType real = real_type(type);
    if (!is_floating(real) || flavour == Flavour::kAnyBits) {
      auto* bytes = static_cast<unsigned char*>(to);
      for (size_t i = 0; i < count * size_of(type); ++i) bytes[i] = static_cast<unsigned char>(bits());
      // Integers whose sums keep a small quotient, besides those that wrap around.
      if (!is_floating(real) && flavour == Flavour::kOrdinary) {
        for (size_t i = 0; i < count; ++i) write_integer(type, to, i, below(41) - 20);
      }
      if (!is_floating(real)) return;
    }
    for (size_t i = 0; i < count * parts; ++i) {
      switch (flavour) {
        case Flavour::kOrdinary:
          write_floating(real, to, i, uniform() * 8);
          break;
        case Flavour::kHuge:
          write_floating(real, to, i, below(4) == 0 ? largest(real) : uniform() * largest(real));
          break;
        case Flavour::kTiny:
          write_floating(real, to, i, uniform() * 4 * smallest_normal(real));
          break;
        case Flavour::kAnyBits:
          if (below(8) == 0) write_floating(real, to, i, special());
          break;
      }
    }
  }

  static void write_integer(DataType type, void* to, size_t index, int64_t value) {
    std::memcpy(static_cast<char*>(to) + index * size_of(type), &value, size_of(type));  // little-endian
  }

 private:
  double special() {
    constexpr std::array<double, 8> kSpecial = {0.0, -0.0, INFINITY, -INFINITY, NAN, 1.0, -1.0, 65520.0};
    return kSpecial[static_cast<size_t>(below(kSpecial.size()))];
  }

  std::mt19937_64 engine_;
};

// Bytes at a chosen distance from an aligned address, with guard bytes on both sides.
class Buffer {
 public:
  Buffer(size_t bytes, size_t offset) : size_(bytes), offset_(offset), memory_(bytes + offset + 2 * kGuard, kFill) {}
  Buffer(const Buffer& other) : Buffer(other.size_, other.offset_) { std::memcpy(data(), other.data(), size_); }
  Buffer& operator=(const Buffer&) = delete;

  unsigned char* data() { return memory_.data() + start(); }
  const unsigned char* data() const { return memory_.data() + start(); }
  size_t size() const { return size_; }

  bool guards_intact() const {
    for (size_t i = 0; i < memory_.size(); ++i) {
      if ((i < start() || i >= start() + size_) && memory_[i] != kFill) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kGuard = 64;
  static constexpr unsigned char kFill = 0xa5;
  size_t start() const {
    const size_t misaligned = reinterpret_cast<uintptr_t>(memory_.data()) % kGuard;
    return (kGuard - misaligned) % kGuard + offset_;
  }

  size_t size_;
  size_t offset_;
  std::vector<unsigned char> memory_;
};

// Index of the first element that differs, or -1.
inline int64_t first_difference(DataType type, const void* a, const void* b, size_t count) {
  const DataType real = real_type(type);
  const size_t parts = is_complex(type) ? 2 : 1;
  const size_t size = size_of(real);
  for (size_t i = 0; i < count * parts; ++i) {
    const auto* left = static_cast<const char*>(a) + i * size;
    const auto* right = static_cast<const char*>(b) + i * size;
    if (std::memcmp(left, right, size) == 0) continue;
    if (is_floating(real)) {
      const double x = read_floating(real, left, 0);
      const double y = read_floating(real, right, 0);
      if (x != x && y != y) continue;
    }
    return static_cast<int64_t>(i / parts);
  }
  return -1;
}

inline std::string hex(const void* data, size_t index, size_t size) {
  std::string text = "0x";
  const auto* bytes = static_cast<const unsigned char*>(data) + index * size;
  for (size_t i = size; i-- > 0;) {
    constexpr std::string_view kDigits = "0123456789abcdef";
    text += kDigits[bytes[i] >> 4];
    text += kDigits[bytes[i] & 15];
  }
  return text;
}

}  // namespace fusewire::testing
