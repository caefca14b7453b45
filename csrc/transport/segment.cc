#include "transport/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "common/error.h"

namespace fusewire {
namespace {

constexpr uint64_t kAlignment = 2u << 20;       // of the data area: a huge page, where the system gives them
constexpr uint64_t kMostBytes = 256ULL << 30;   // sparse: only what is touched exists
constexpr uint64_t kLeastBytes = 256ULL << 20;  // below this no data plane can work
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

uint64_t round_up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }

[[noreturn]] void fail(const std::string& what, int error) {
  throw Error(ErrorCode::kInternal, "shared memory: " + what + ": " + std::strerror(error));
}

// A limit on file sizes (ulimit -f) holds for memfd too, and exceeding it kills the process by SIGXFSZ.
uint64_t file_size_limit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return kMostBytes;
  return std::min<uint64_t>(kMostBytes, limit.rlim_cur / kAlignment * kAlignment);
}

}  // namespace

Segment::Segment(Descriptor memory, int size, const Welcome& layout)
    : memory_(std::move(memory)), size_(size), layout_(layout), control_(map(0, layout.control_bytes)) {}

Segment Segment::create(int size) {
  Descriptor memory = Descriptor::make([] { return memfd_create("fusewire", MFD_CLOEXEC | MFD_ALLOW_SEALING); });
  if (!memory) fail("memfd_create", errno);
  Welcome layout;
  layout.control_bytes = StarMemory::bytes(size);
  layout.data_offset = round_up(layout.control_bytes, kAlignment);
  int error = EFBIG;
  for (uint64_t total = file_size_limit(); total >= layout.data_offset + kLeastBytes; total /= 2) {
    if (ftruncate(memory.get(), static_cast<off_t>(total)) == 0) {
      layout.total_bytes = total;
      break;
    }
    error = errno;
  }
  if (layout.total_bytes == 0) fail("ftruncate (see ulimit -f)", error);
  if (fcntl(memory.get(), F_ADD_SEALS, kSeals) != 0) fail("F_ADD_SEALS", errno);
  return {std::move(memory), size, layout};
}

Segment Segment::adopt(Descriptor memory, int size, const Welcome& welcome) {
  if (!memory) {
    throw Error(ErrorCode::kPeerLost, "the memory that rank 0 shares did not arrive (too many open files here?)", 0);
  }
  struct stat status{};
  const int seals = fcntl(memory.get(), F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals || fstat(memory.get(), &status) != 0 ||
      static_cast<uint64_t>(status.st_size) != welcome.total_bytes ||
      welcome.control_bytes != StarMemory::bytes(size) || welcome.data_offset < welcome.control_bytes ||
      welcome.data_offset % kAlignment != 0 || welcome.data_offset > welcome.total_bytes) {
    throw Error(ErrorCode::kInvalidArgument,
                "rank 0 shares memory in another layout: do all ranks run the same build of Fusewire?", 0);
  }
  return {std::move(memory), size, welcome};
}

SharedMapping Segment::map_data(uint64_t offset, size_t size) const {
  const uint64_t area = layout_.total_bytes - layout_.data_offset;
  if (offset > area || size > area - offset) {
    throw Error(ErrorCode::kInvalidArgument, "shared memory: bytes " + std::to_string(offset) + " to " +
                                                 std::to_string(offset + size) + " are outside the area of " +
                                                 std::to_string(area) + " bytes");
  }
  return map(layout_.data_offset + offset, size);
}

SharedMapping Segment::map(uint64_t offset, size_t size) const {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const uint64_t begin = offset / page * page;
  const auto length = static_cast<size_t>(std::max<uint64_t>(round_up(offset + size, page) - begin, page));
  void* memory = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, memory_.get(), static_cast<off_t>(begin));
  if (memory == MAP_FAILED) fail("mmap of " + std::to_string(size) + " bytes", errno);
  madvise(memory, length, MADV_DONTFORK);
  SharedMapping mapping;
  mapping.keep_alive = std::shared_ptr<void>(memory, [length, born = fork_generation()](void* at) {
    // A forked child does not have the mapping, and may have another one there.
    if (fork_generation() == born) munmap(at, length);
  });
  mapping.data = static_cast<std::byte*>(memory) + (offset - begin);
  mapping.size = size;
  return mapping;
}

}  // namespace fusewire
