#include "transport/socket.h"

#include <sys/random.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

namespace fusewire {
namespace {

constexpr uint32_t kMagic = 0x46575231;  // "FWR1"
constexpr size_t kMaxPayload = 8192;
constexpr char kPrefix[] = "fusewire-";

struct Header {
  uint32_t magic = kMagic;
  uint16_t type = 0;
  uint16_t zero = 0;
  uint32_t length = 0;
};

class Writer {
 public:
  explicit Writer(SocketFrameType type) { frame_.type = type; }
  template <class T>
  Writer& number(T value) {
    return bytes(&value, sizeof value);
  }
  Writer& text(const std::string& text, size_t limit) {
    const size_t length = std::min(text.size(), limit);
    number(static_cast<uint32_t>(length));
    return bytes(text.data(), length);
  }
  SocketFrame done() { return std::move(frame_); }

 private:
  Writer& bytes(const void* data, size_t size) {
    if (size == 0) return *this;
    const size_t before = frame_.payload.size();
    frame_.payload.resize(before + size);  // insert() of a range makes GCC 12 see an overflow that is none
    std::memcpy(frame_.payload.data() + before, data, size);
    return *this;
  }
  SocketFrame frame_;
};

class Reader {
 public:
  Reader(const SocketFrame& frame, SocketFrameType type) : left_(frame.payload), good_(frame.type == type) {}
  template <class T>
  Reader& number(T& value) {
    if (take(sizeof value)) std::memcpy(&value, taken_.data(), sizeof value);
    return *this;
  }
  Reader& text(std::string& text, size_t limit) {
    uint32_t length = 0;
    number(length);
    if (length > limit) good_ = false;
    if (take(length)) text.assign(reinterpret_cast<const char*>(taken_.data()), length);
    return *this;
  }
  bool done() const { return good_ && left_.empty(); }

 private:
  bool take(size_t size) {
    good_ = good_ && left_.size() >= size;
    if (!good_) return false;
    taken_ = left_.first(size);
    left_ = left_.subspan(size);
    return true;
  }
  std::span<const std::byte> left_;
  std::span<const std::byte> taken_;
  bool good_;
};

// Receives into `to`, and a passed descriptor, if one came, into `passed`. A descriptor nobody asked for is dropped by
// the kernel. Does not block.
ssize_t receive(int socket, std::span<std::byte> to, Descriptor* passed) {
  if (passed == nullptr) return recv(socket, to.data(), to.size(), MSG_DONTWAIT);
  iovec part{to.data(), to.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t got = -1;
  Descriptor fresh = Descriptor::make([&] {
    got = recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (got < 0) return -1;
    const cmsghdr* head = CMSG_FIRSTHDR(&message);
    if (head == nullptr || head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) return -1;
    int fd = -1;
    std::memcpy(&fd, CMSG_DATA(head), sizeof fd);
    return fd;
  });
  if (fresh) *passed = std::move(fresh);
  return got;
}

}  // namespace

SocketFrame encode(const Hello& hello) {
  return Writer(SocketFrameType::kHello)
      .number(hello.version)
      .number(hello.rank)
      .number(hello.size)
      .text(hello.secret, kMaxSecretBytes)
      .done();
}

SocketFrame encode(const Welcome& welcome) {
  return Writer(SocketFrameType::kWelcome)
      .number(welcome.control_bytes)
      .number(welcome.data_offset)
      .number(welcome.total_bytes)
      .done();
}

SocketFrame encode(const Reject& reject) {
  return Writer(SocketFrameType::kReject)
      .number(static_cast<uint8_t>(reject.code))
      .text(reject.text, kMaxReasonBytes)
      .done();
}

SocketFrame encode(const Goodbye& goodbye) {
  return Writer(SocketFrameType::kGoodbye)
      .number(static_cast<uint8_t>(goodbye.clean ? 1 : 0))
      .text(goodbye.reason, kMaxReasonBytes)
      .done();
}

bool decode(const SocketFrame& frame, Hello& hello) {
  return Reader(frame, SocketFrameType::kHello)
      .number(hello.version)
      .number(hello.rank)
      .number(hello.size)
      .text(hello.secret, kMaxSecretBytes)
      .done();
}

bool decode(const SocketFrame& frame, Welcome& welcome) {
  return Reader(frame, SocketFrameType::kWelcome)
      .number(welcome.control_bytes)
      .number(welcome.data_offset)
      .number(welcome.total_bytes)
      .done();
}

bool decode(const SocketFrame& frame, Reject& reject) {
  uint8_t code = 0;
  if (!Reader(frame, SocketFrameType::kReject).number(code).text(reject.text, kMaxReasonBytes).done()) return false;
  if (code >= kErrorCodeCount) return false;
  reject.code = static_cast<ErrorCode>(code);
  return true;
}

bool decode(const SocketFrame& frame, Goodbye& goodbye) {
  uint8_t clean = 0;
  if (!Reader(frame, SocketFrameType::kGoodbye).number(clean).text(goodbye.reason, kMaxReasonBytes).done()) {
    return false;
  }
  goodbye.clean = clean != 0;
  return clean <= 1;
}

bool send_frame(int socket, const SocketFrame& frame, int descriptor_to_pass) {
  const Header header{.type = static_cast<uint16_t>(frame.type), .length = static_cast<uint32_t>(frame.payload.size())};
  std::vector<std::byte> bytes(sizeof header + frame.payload.size());
  std::memcpy(bytes.data(), &header, sizeof header);
  std::copy(frame.payload.begin(), frame.payload.end(), bytes.begin() + sizeof header);

  iovec part{bytes.data(), bytes.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (descriptor_to_pass >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(head), &descriptor_to_pass, sizeof(int));
  }
  ssize_t sent = -1;
  do {
    sent = sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (sent < 0 && errno == EINTR);
  return sent == static_cast<ssize_t>(bytes.size());
}

SocketReader::Result SocketReader::read(int socket, SocketFrame& frame, Descriptor* passed) {
  for (;;) {
    size_t want = sizeof(Header);
    Header header;
    if (bytes_.size() >= sizeof header) {
      std::memcpy(&header, bytes_.data(), sizeof header);
      if (header.magic != kMagic || header.zero != 0 || header.length > kMaxPayload) return Result::kMalformed;
      want += header.length;
      if (bytes_.size() == want) {
        frame.type = static_cast<SocketFrameType>(header.type);
        frame.payload.assign(bytes_.begin() + sizeof header, bytes_.end());
        bytes_.clear();
        return Result::kFrame;
      }
    }
    const size_t have = bytes_.size();
    bytes_.resize(want);
    const ssize_t got = receive(socket, std::span(bytes_).subspan(have), passed);
    bytes_.resize(have + static_cast<size_t>(std::max<ssize_t>(got, 0)));
    if (got == 0) return Result::kClosed;
    if (got < 0 && errno != EINTR) return errno == EAGAIN ? Result::kNothing : Result::kClosed;
  }
}

Descriptor listen_abstract(int backlog, std::string& address) {
  std::array<unsigned char, 16> random{};
  if (getrandom(random.data(), random.size(), 0) != static_cast<ssize_t>(random.size())) {
    throw Error(ErrorCode::kInternal, std::string("getrandom: ") + std::strerror(errno));
  }
  address = kPrefix;
  for (const unsigned char byte : random) {
    address += "0123456789abcdef"[byte >> 4];
    address += "0123456789abcdef"[byte & 15];
  }
  sockaddr_un name{};
  socklen_t length = 0;
  abstract_name(address, name, length);
  Descriptor socket = Descriptor::make([] { return ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); });
  if (!socket || bind(socket.get(), reinterpret_cast<const sockaddr*>(&name), length) != 0 ||
      listen(socket.get(), backlog) != 0) {
    throw Error(ErrorCode::kInternal, std::string("cannot listen on a Unix socket: ") + std::strerror(errno));
  }
  return socket;
}

void abstract_name(const std::string& address, sockaddr_un& name, socklen_t& length) {
  if (address.empty() || address.size() + 1 > sizeof name.sun_path) {
    throw Error(ErrorCode::kInvalidArgument, "'" + address.substr(0, 200) + "' is not the address of a rank 0");
  }
  name = {};
  name.sun_family = AF_UNIX;
  std::copy(address.begin(), address.end(), name.sun_path + 1);  // a leading zero byte: no file
  length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + address.size());
}

PeerCredentials credentials(int socket) {
  ucred who{};
  socklen_t length = sizeof who;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &who, &length) != 0) {
    throw Error(ErrorCode::kInternal, std::string("SO_PEERCRED: ") + std::strerror(errno));
  }
  return {.pid = who.pid, .uid = who.uid};
}

}  // namespace fusewire
