// Every value, offset, size and signature of nccl_abi.h against a real nccl.h.
#include "collective/nccl/nccl_abi.h"

#include <gtest/gtest.h>
#include <nccl.h>

#include <cstddef>
#include <cstring>
#include <type_traits>

namespace fusewire::testing {
namespace {

template <typename Ours, typename Theirs>
constexpr bool equal(Ours ours, Theirs theirs) {
  return static_cast<int>(ours) == static_cast<int>(theirs);
}

static_assert(nccl_version(2, 19, 3) == NCCL_VERSION(2, 19, 3));
static_assert(kNcclOldest <= NCCL_VERSION_CODE && NCCL_VERSION_CODE < kNcclTooNew);
static_assert(sizeof(NcclUniqueId) == sizeof(ncclUniqueId) && alignof(NcclUniqueId) == alignof(ncclUniqueId));

static_assert(sizeof(ncclResult_t) == sizeof(int));
static_assert(equal(NcclResult::kSuccess, ncclSuccess));
static_assert(equal(NcclResult::kUnhandledCudaError, ncclUnhandledCudaError));
static_assert(equal(NcclResult::kSystemError, ncclSystemError));
static_assert(equal(NcclResult::kInternalError, ncclInternalError));
static_assert(equal(NcclResult::kInvalidArgument, ncclInvalidArgument));
static_assert(equal(NcclResult::kInvalidUsage, ncclInvalidUsage));
static_assert(equal(NcclResult::kRemoteError, ncclRemoteError));
static_assert(equal(NcclResult::kInProgress, ncclInProgress));

static_assert(sizeof(ncclDataType_t) == sizeof(int));
static_assert(equal(NcclType::kInt8, ncclInt8) && equal(NcclType::kUint8, ncclUint8));
static_assert(equal(NcclType::kInt32, ncclInt32) && equal(NcclType::kUint32, ncclUint32));
static_assert(equal(NcclType::kInt64, ncclInt64) && equal(NcclType::kUint64, ncclUint64));
static_assert(equal(NcclType::kFloat16, ncclFloat16) && equal(NcclType::kFloat32, ncclFloat32));
static_assert(equal(NcclType::kFloat64, ncclFloat64) && equal(NcclType::kBfloat16, ncclBfloat16));

static_assert(sizeof(ncclRedOp_t) == sizeof(int));
static_assert(equal(NcclOp::kSum, ncclSum) && equal(NcclOp::kProd, ncclProd));
static_assert(equal(NcclOp::kMax, ncclMax) && equal(NcclOp::kMin, ncclMin));

static_assert(offsetof(NcclConfig, size) == offsetof(ncclConfig_t, size));
static_assert(offsetof(NcclConfig, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(NcclConfig, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(NcclConfig, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(offsetof(NcclConfig, cga_cluster_size) == offsetof(ncclConfig_t, cgaClusterSize));
static_assert(offsetof(NcclConfig, min_ctas) == offsetof(ncclConfig_t, minCTAs));
static_assert(offsetof(NcclConfig, max_ctas) == offsetof(ncclConfig_t, maxCTAs));
static_assert(offsetof(NcclConfig, net_name) == offsetof(ncclConfig_t, netName));
static_assert(offsetof(NcclConfig, split_share) == offsetof(ncclConfig_t, splitShare));
static_assert(sizeof(NcclConfig) <= sizeof(ncclConfig_t));
static_assert(NcclConfig::kUnset == NCCL_CONFIG_UNDEF_INT);
#if NCCL_VERSION_CODE >= 22600
static_assert(offsetof(NcclConfig, traffic_class) == offsetof(ncclConfig_t, trafficClass));
#endif
#if NCCL_VERSION_CODE >= 22700
static_assert(kNcclWindowSymmetric == NCCL_WIN_COLL_SYMMETRIC);
#endif
#ifdef NCCL_WIN_REQUIRED_ALIGNMENT
static_assert(kNcclWindowAlignment == NCCL_WIN_REQUIRED_ALIGNMENT);
#endif

// How a parameter is passed.
template <typename Ours, typename Theirs>
constexpr bool kPassedAlike = sizeof(Ours) == sizeof(Theirs) && std::is_pointer_v<Ours> == std::is_pointer_v<Theirs> &&
                              std::is_class_v<Ours> == std::is_class_v<Theirs>;

template <typename Ours, typename Theirs>
struct CalledAlike : std::false_type {};
template <typename R, typename... Ours, typename S, typename... Theirs>
struct CalledAlike<R (*)(Ours...), S (*)(Theirs...)>
    : std::bool_constant<kPassedAlike<R, S> && sizeof...(Ours) == sizeof...(Theirs) && []() {
      if constexpr (sizeof...(Ours) == sizeof...(Theirs)) {
        return (kPassedAlike<Ours, Theirs> && ...);
      } else {
        return false;
      }
    }()> {};

#define FUSEWIRE_SAME(name) static_assert(CalledAlike<decltype(NcclFunctions::name), decltype(&::name)>::value)
FUSEWIRE_SAME(ncclGetVersion);
FUSEWIRE_SAME(ncclGetErrorString);
FUSEWIRE_SAME(ncclGetLastError);
FUSEWIRE_SAME(ncclGetUniqueId);
FUSEWIRE_SAME(ncclCommInitRankConfig);
FUSEWIRE_SAME(ncclCommGetAsyncError);
FUSEWIRE_SAME(ncclCommAbort);
FUSEWIRE_SAME(ncclCommFinalize);
FUSEWIRE_SAME(ncclCommDestroy);
FUSEWIRE_SAME(ncclGroupStart);
FUSEWIRE_SAME(ncclGroupEnd);
FUSEWIRE_SAME(ncclAllReduce);
FUSEWIRE_SAME(ncclReduce);
FUSEWIRE_SAME(ncclReduceScatter);
FUSEWIRE_SAME(ncclAllGather);
FUSEWIRE_SAME(ncclBroadcast);
FUSEWIRE_SAME(ncclSend);
FUSEWIRE_SAME(ncclRecv);
FUSEWIRE_SAME(ncclMemAlloc);
FUSEWIRE_SAME(ncclMemFree);
#if NCCL_VERSION_CODE >= 22700
FUSEWIRE_SAME(ncclCommWindowRegister);
FUSEWIRE_SAME(ncclCommWindowDeregister);
#endif

TEST(NcclAbi, AConfigOfOursIsTheBeginningOfTheirs) {
  const NcclConfig ours;
  ncclConfig_t theirs = NCCL_CONFIG_INITIALIZER;
  theirs.size = ours.size;
  theirs.version = ours.version;
  EXPECT_EQ(std::memcmp(&ours, &theirs, sizeof(ours)), 0);
}

}  // namespace
}  // namespace fusewire::testing
