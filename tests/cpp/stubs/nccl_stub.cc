// A library that looks like some version of NCCL to whoever opens it, and does nothing. Versions differ in what is
// missing, as the real ones do.
#include "collective/nccl/nccl_abi.h"

#define FUSEWIRE_EXPORT extern "C" __attribute__((visibility("default")))

FUSEWIRE_EXPORT int ncclGetVersion(int* version) {
  *version = FUSEWIRE_STUB_VERSION;
  return 0;
}

#if FUSEWIRE_STUB_VERSION >= 21900
using fusewire::NcclComm;
using fusewire::NcclConfig;
using fusewire::NcclUniqueId;
using fusewire::NcclWindow;

FUSEWIRE_EXPORT const char* ncclGetErrorString(int result) { return result == 5 ? "invalid usage" : "some error"; }
FUSEWIRE_EXPORT const char* ncclGetLastError(NcclComm) { return "the stub was asked"; }
// What came in is given back, so that the test sees the arguments arrive.
FUSEWIRE_EXPORT int ncclGetUniqueId(NcclUniqueId* id) {
  for (char& c : id->internal) c = 'x';
  return 0;
}
FUSEWIRE_EXPORT int ncclCommInitRankConfig(NcclComm* comm, int size, NcclUniqueId id, int rank, NcclConfig* config) {
  *comm = reinterpret_cast<NcclComm>(static_cast<size_t>(size * 1000 + rank));
  return id.internal[127] == 'x' && config->magic == 0xcafebeef && config->blocking == 0 ? 7 : 4;
}
FUSEWIRE_EXPORT int ncclCommGetAsyncError(NcclComm, int* error) {
  *error = 6;
  return 0;
}
FUSEWIRE_EXPORT int ncclCommAbort(NcclComm) { return 1; }
FUSEWIRE_EXPORT int ncclCommFinalize(NcclComm) { return 2; }
FUSEWIRE_EXPORT int ncclCommDestroy(NcclComm) { return 3; }
FUSEWIRE_EXPORT int ncclGroupStart() { return 0; }
FUSEWIRE_EXPORT int ncclGroupEnd() { return 7; }
FUSEWIRE_EXPORT int ncclAllReduce(const void* from, void* to, size_t count, int type, int op, NcclComm comm,
                                  void* stream) {
  return from == stream && to == comm && count == 11 && type == 9 && op == 2 ? 0 : 4;
}
FUSEWIRE_EXPORT int ncclReduce(const void*, void*, size_t count, int type, int op, int root, NcclComm, void*) {
  return count == 12 && type == 8 && op == 3 && root == 1 ? 0 : 4;
}
FUSEWIRE_EXPORT int ncclReduceScatter(const void*, void*, size_t count, int type, int op, NcclComm, void*) {
  return count == 13 && type == 6 && op == 1 ? 0 : 4;
}
FUSEWIRE_EXPORT int ncclAllGather(const void*, void*, size_t count, int type, NcclComm, void*) {
  return count == 14 && type == 1 ? 0 : 4;
}
FUSEWIRE_EXPORT int ncclBroadcast(const void*, void*, size_t count, int type, int root, NcclComm, void*) {
  return count == 15 && type == 0 && root == 2 ? 0 : 4;
}
FUSEWIRE_EXPORT int ncclSend(const void*, size_t count, int type, int peer, NcclComm, void*) {
  return count == 16 && type == 4 && peer == 3 ? 0 : 4;
}
FUSEWIRE_EXPORT int ncclRecv(void*, size_t count, int type, int peer, NcclComm, void*) {
  return count == 17 && type == 5 && peer == 4 ? 0 : 4;
}
FUSEWIRE_EXPORT int ncclMemAlloc(void** memory, size_t bytes) {
  *memory = reinterpret_cast<void*>(bytes);
  return 0;
}
FUSEWIRE_EXPORT int ncclMemFree(void*) { return 0; }
#endif

#if FUSEWIRE_STUB_VERSION >= 22700
FUSEWIRE_EXPORT int ncclCommWindowRegister(NcclComm, void*, size_t, NcclWindow* window, int flags) {
  *window = reinterpret_cast<NcclWindow>(static_cast<size_t>(flags));
  return 0;
}
FUSEWIRE_EXPORT int ncclCommWindowDeregister(NcclComm, NcclWindow window) {
  return window == reinterpret_cast<NcclWindow>(size_t{1}) ? 0 : 4;
}
#endif
