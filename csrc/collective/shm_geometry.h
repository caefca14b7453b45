// How buckets are cut into chunks. Depends on nothing but what all ranks know.
#pragma once

#include <cstddef>

namespace fusewire {

class ShmGeometry {
 public:
  // `chunk_bytes` is what the user asks for, 0 for a choice by size. `crowded`: ranks outnumber cores.
  // `direct_bytes`: the smallest row that directly() is said of, 0 for a choice by size.
  ShmGeometry(int size, size_t chunk_bytes, size_t direct_bytes, bool crowded);

  // The chunk for a reduction of `bytes` (in the type of the wire); 0: all at once.
  size_t for_reduction(size_t bytes) const;

  // Whether every rank does the whole of an Adasum of `bytes` itself.
  bool adasum_at_once(size_t bytes) const;

  // The chunk where a rank gives at most `bytes` to others, who only copy them.
  size_t for_copying(size_t bytes) const;

  // Whether `bytes` in `parts` are better read from where they lie (shm_direct.cc Note [Direct exchange]), where every
  // rank gives that many, or only one does.
  bool directly(size_t bytes, size_t parts) const;
  bool broadcast_directly(size_t bytes, size_t parts) const;

 private:
  struct Row;
  size_t clamp(size_t chunk) const;
  bool directly(size_t bytes, size_t parts, size_t largest) const;

  int size_;
  size_t chunk_bytes_;
  size_t direct_bytes_;
  bool crowded_;
};

}  // namespace fusewire
