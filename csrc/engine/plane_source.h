// What makes data planes: one source per kind, and the table that picks one.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "collective/backend.h"
#include "collective/shm.h"
#include "common/config.h"
#include "common/logging.h"
#include "transport/endpoint.h"

namespace fusewire {

// A process set, as a source sees it.
struct PlaneSet {
  uint32_t id = 0;
  std::vector<int32_t> ranks;  // global, sorted
};

class PlaneSource {
 public:
  virtual ~PlaneSource() = default;
  virtual std::string_view name() const = 0;

  // The plane of a set; `rank` is this one's number in it. All members make it, and any of them may be late.
  virtual std::unique_ptr<Backend> make(const PlaneSet& set, int rank) = 0;

  // Backend::abort() for somebody who is not a member. The result keeps what it needs.
  virtual std::unique_ptr<Backend> make_foreign(const PlaneSet& set) = 0;
};

struct PlaneContext {
  Endpoint& endpoint;
  const Config& config;
  const Logger& logger;
  ShmOptions shm;  // rank and size are filled in per set; spin and abort_after are every plane's
};

// The source for tensors on `device`: of the kinds that serve it, best first, the one that config.backend names, or the
// first that works in this job. Throws Error(kInvalidArgument) where that one does not work.
std::unique_ptr<PlaneSource> make_plane_source(DeviceType device, const PlaneContext& context);

}  // namespace fusewire
