// The memory the ranks of one host share: an anonymous file (memfd) that has no name anywhere, is passed over the
// sockets, and ends with its last holder. First the control part (StarMemory), then a large sparse data area.
#pragma once

#include <cstddef>
#include <cstdint>

#include "transport/endpoint.h"
#include "transport/fork_guard.h"
#include "transport/socket.h"
#include "transport/star.h"

namespace fusewire {

class Segment {
 public:
  static Segment create(int size);
  // Checks that the descriptor is what `welcome` says, and that nobody can shrink it under us.
  static Segment adopt(Descriptor memory, int size, const Welcome& welcome);

  StarMemory star() const { return {control_.data, size_}; }
  Welcome welcome() const { return layout_; }
  int descriptor() const { return memory_.get(); }

  SharedMapping map_data(uint64_t offset, size_t size) const;
  void close() { memory_.close(); }
  void close_in_child() noexcept { memory_.close_in_child(); }

 private:
  Segment(Descriptor memory, int size, const Welcome& layout);
  SharedMapping map(uint64_t offset, size_t size) const;

  Descriptor memory_;
  int size_;
  Welcome layout_;
  SharedMapping control_;
};

}  // namespace fusewire
