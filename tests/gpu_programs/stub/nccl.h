// The little of NCCL that common/ranks.cuh uses, for a machine without NCCL.
#pragma once
enum ncclResult_t { ncclSuccess };
struct ncclUniqueId {
    char internal[128];
};
inline ncclResult_t ncclGetUniqueId(ncclUniqueId*) { return ncclSuccess; }
inline const char* ncclGetErrorString(ncclResult_t) { return ""; }
inline const char* ncclGetLastError(void*) { return ""; }
