// Small frames over Unix sockets: who a connection is, whether it is welcome, why it leaves. They carry no traffic;
// that goes through the mailboxes.
#pragma once

#include <sys/socket.h>
#include <sys/types.h>
#include <sys/un.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/error.h"
#include "transport/fork_guard.h"

namespace fusewire {

inline constexpr size_t kMaxReasonBytes = 4096;
inline constexpr size_t kMaxSecretBytes = 1024;

enum class SocketFrameType : uint16_t { kHello = 1, kWelcome = 2, kReject = 3, kGoodbye = 4 };

struct SocketFrame {
  SocketFrameType type = SocketFrameType::kHello;
  std::vector<std::byte> payload;
};

// Leaf to root, first.
struct Hello {
  uint32_t version = 0;
  int32_t rank = -1;
  int32_t size = 0;
  std::string secret;
};

// Root to leaf when all ranks have come; the memory's descriptor travels with it.
struct Welcome {
  uint64_t control_bytes = 0;
  uint64_t data_offset = 0;
  uint64_t total_bytes = 0;
};

// Root to leaf instead of a Welcome.
struct Reject {
  ErrorCode code = ErrorCode::kPeerLost;
  std::string text;
};

// Either way, last.
struct Goodbye {
  bool clean = false;
  std::string reason;
};

SocketFrame encode(const Hello& hello);
SocketFrame encode(const Welcome& welcome);
SocketFrame encode(const Reject& reject);
SocketFrame encode(const Goodbye& goodbye);

// False: malformed.
bool decode(const SocketFrame& frame, Hello& hello);
bool decode(const SocketFrame& frame, Welcome& welcome);
bool decode(const SocketFrame& frame, Reject& reject);
bool decode(const SocketFrame& frame, Goodbye& goodbye);

// Sends without blocking; frames are smaller than any socket buffer, so that only a peer that reads nothing, or is
// gone, makes it false.
bool send_frame(int socket, const SocketFrame& frame, int descriptor_to_pass = -1);

// Puts one frame after another together, never reading past the end of the current one.
class SocketReader {
 public:
  // kNothing: no whole frame yet. kClosed: end of file or a broken connection, after all data was read.
  enum class Result : uint8_t { kNothing, kFrame, kClosed, kMalformed };
  Result read(int socket, SocketFrame& frame, Descriptor* passed = nullptr);

 private:
  std::vector<std::byte> bytes_;
};

// A listening socket on a fresh abstract address that nobody can guess.
Descriptor listen_abstract(int backlog, std::string& address);

// The name under which `address` is bound. Throws Error(kInvalidArgument) for what cannot be one.
void abstract_name(const std::string& address, sockaddr_un& name, socklen_t& length);

struct PeerCredentials {
  pid_t pid = 0;  // 0: it lives in another pid namespace
  uid_t uid = 0;
};
PeerCredentials credentials(int socket);

}  // namespace fusewire
