// The part of NCCL's binary interface that Fusewire uses, declared here, because NCCL is the one that torch has loaded
// and no nccl.h is needed to build. Where there is one, nccl_abi_test.cc holds every line of this against it.
//
// Note [Which NCCL]
// From 2.19 on, whose ncclMemAlloc is the youngest thing that is always wanted; what is younger is looked up and may be
// missing. NCCL reads as many bytes of an NcclConfig as its `size` says and takes its own defaults for the rest, so the
// beginning of the struct, declared as of 2.19, is good for all later versions.
#pragma once

#include <climits>
#include <cstddef>

namespace fusewire {

struct NcclCommOpaque;
struct NcclWindowOpaque;
using NcclComm = NcclCommOpaque*;      // ncclComm_t
using NcclWindow = NcclWindowOpaque*;  // ncclWindow_t

constexpr int nccl_version(int major, int minor, int patch) { return major * 10000 + minor * 100 + patch; }
inline constexpr int kNcclOldest = nccl_version(2, 19, 0);
inline constexpr int kNcclTooNew = nccl_version(3, 0, 0);

struct NcclUniqueId {
  char internal[128];
};

enum class NcclResult : int {
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

enum class NcclType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};

constexpr size_t width_of(NcclType type) {
  switch (type) {
    case NcclType::kInt8:
    case NcclType::kUint8:
      return 1;
    case NcclType::kFloat16:
    case NcclType::kBfloat16:
      return 2;
    case NcclType::kInt32:
    case NcclType::kUint32:
    case NcclType::kFloat32:
      return 4;
    case NcclType::kInt64:
    case NcclType::kUint64:
    case NcclType::kFloat64:
      return 8;
  }
  return 0;
}

enum class NcclOp : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3 };

struct NcclConfig {
  static constexpr int kUnset = INT_MIN;

  size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = static_cast<unsigned>(kNcclOldest);
  int blocking = kUnset;
  int cga_cluster_size = kUnset;
  int min_ctas = kUnset;
  int max_ctas = kUnset;
  const char* net_name = nullptr;
  int split_share = kUnset;
  int traffic_class = kUnset;  // since 2.26; before that padding, which is copied along
};

inline constexpr int kNcclWindowSymmetric = 0x01;     // NCCL_WIN_COLL_SYMMETRIC, since 2.27
inline constexpr size_t kNcclWindowAlignment = 4096;  // NCCL_WIN_REQUIRED_ALIGNMENT

// NCCL's functions. Enumerations are passed as ints, the id by value; a stream is a cudaStream_t.
struct NcclFunctions {
  int (*ncclGetVersion)(int*);
  const char* (*ncclGetErrorString)(int);
  const char* (*ncclGetLastError)(NcclComm);
  int (*ncclGetUniqueId)(NcclUniqueId*);
  int (*ncclCommInitRankConfig)(NcclComm*, int, NcclUniqueId, int, NcclConfig*);
  int (*ncclCommGetAsyncError)(NcclComm, int*);
  int (*ncclCommAbort)(NcclComm);
  int (*ncclCommFinalize)(NcclComm);
  int (*ncclCommDestroy)(NcclComm);
  int (*ncclGroupStart)();
  int (*ncclGroupEnd)();
  int (*ncclAllReduce)(const void*, void*, size_t, int, int, NcclComm, void*);
  int (*ncclReduce)(const void*, void*, size_t, int, int, int, NcclComm, void*);
  int (*ncclReduceScatter)(const void*, void*, size_t, int, int, NcclComm, void*);
  int (*ncclAllGather)(const void*, void*, size_t, int, NcclComm, void*);
  int (*ncclBroadcast)(const void*, void*, size_t, int, int, NcclComm, void*);
  int (*ncclSend)(const void*, size_t, int, int, NcclComm, void*);
  int (*ncclRecv)(void*, size_t, int, int, NcclComm, void*);
  // May be missing.
  int (*ncclMemAlloc)(void**, size_t);
  int (*ncclMemFree)(void*);
  int (*ncclCommWindowRegister)(NcclComm, void*, size_t, NcclWindow*, int);
  int (*ncclCommWindowDeregister)(NcclComm, NcclWindow);
};

}  // namespace fusewire
