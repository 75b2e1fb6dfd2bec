// Windows made of physical allocations of our own, one after another in one address range: several segments, on the GPU or
// in host memory. The driver's functions are resolved at run time.
#pragma once

#include <algorithm>

#include <cuda.h>

#include "ranks.cuh"

// A function of the driver by its name, of the version that the headers declare, or of the driver's own where that is older
// (within one major version the runtime runs on an older driver, but refuses to be asked for a newer one's functions);
// `Function` is its type.
template <typename Function>
Function driver(const char* name) {
    void* found = nullptr;
    int version = 0;
    CUDA(cudaDriverGetVersion(&version));
    cudaDriverEntryPointQueryResult result{};
    CUDA(cudaGetDriverEntryPointByVersion(name, &found, std::min(version, CUDA_VERSION), cudaEnableDefault, &result));
    if (result != cudaDriverEntryPointSuccess || !found) throw Absent(format("the CUDA driver has no %s", name));
    return reinterpret_cast<Function>(found);
}

#define DRIVER(name) driver<decltype(&name)>(#name)

inline void driver_check(CUresult result, const char* what) {
    if (result == CUDA_SUCCESS) return;
    const char* text = nullptr;
    DRIVER(cuGetErrorName)(result, &text);
    throw Failure(format("%s: %s", what, text ? text : "an unknown error"));
}

// A context of its own on a GPU, which is the thread's current one from here on.
inline CUcontext new_context(int gpu) {
    CUdevice device{};
    CUcontext made{};
    driver_check(DRIVER(cuDeviceGet)(&device, gpu), "cuDeviceGet");
#if CUDA_VERSION >= 13000
    driver_check(DRIVER(cuCtxCreate)(&made, nullptr, 0, device), "cuCtxCreate");
#else
    driver_check(DRIVER(cuCtxCreate)(&made, 0, device), "cuCtxCreate");
#endif
    return made;
}

enum class Where { GPU, HOST };

// Several physical allocations behind one range of addresses. The current device's GPU and every GPU that reaches it get
// access, and the CPU to segments in host memory.
class Segments {
  public:
    Segments(const std::vector<Where>& kinds, size_t at_least) : kinds_(kinds) {
        CUDA(cudaGetDevice(&device_));
        int devices = 0;
        CUDA(cudaGetDeviceCount(&devices));
        if (std::count(kinds.begin(), kinds.end(), Where::HOST)) {
            int able = 0;
            DRIVER(cuDeviceGetAttribute)(&able, CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, device_);
            DRIVER(cuDeviceGetAttribute)(&node_, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, device_);
            if (!able || node_ < 0) throw Absent("this machine's CUDA driver makes no physical allocations in host memory");
        }
        for (Where kind : kinds) {
            size_t granularity = 0;
            CUmemAllocationProp properties = of(kind);
            driver_check(DRIVER(cuMemGetAllocationGranularity)(&granularity, &properties, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
                         "cuMemGetAllocationGranularity");
            each = std::max(each, (at_least + granularity - 1) / granularity * granularity);
        }
        driver_check(DRIVER(cuMemAddressReserve)(&base_, each * kinds.size(), each, 0, 0), "cuMemAddressReserve");
        for (size_t i = 0; i < kinds.size(); i++) {
            CUmemGenericAllocationHandle handle{};
            CUmemAllocationProp properties = of(kinds[i]);
            driver_check(DRIVER(cuMemCreate)(&handle, each, &properties, 0),
                         kinds[i] == Where::HOST ? "cuMemCreate in host memory" : "cuMemCreate");
            driver_check(DRIVER(cuMemMap)(base_ + i * each, each, 0, handle, 0), "cuMemMap");
            // The mapping keeps it.
            driver_check(DRIVER(cuMemRelease)(handle), "cuMemRelease");
            std::vector<CUmemAccessDesc> access;
            for (int d = 0; d < devices; d++) {
                int reaches = d == device_;
                if (!reaches) CUDA(cudaDeviceCanAccessPeer(&reaches, d, device_));
                if (reaches) access.push_back({{CU_MEM_LOCATION_TYPE_DEVICE, d}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
            }
            if (kinds[i] == Where::HOST)
                access.push_back({{CU_MEM_LOCATION_TYPE_HOST_NUMA, node_}, CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
            driver_check(DRIVER(cuMemSetAccess)(base_ + i * each, each, access.data(), access.size()), "cuMemSetAccess");
        }
    }

    void* base() const { return reinterpret_cast<void*>(base_); }
    size_t bytes() const { return each * kinds_.size(); }

    void free() {
        for (size_t i = 0; i < kinds_.size(); i++) driver_check(DRIVER(cuMemUnmap)(base_ + i * each, each), "cuMemUnmap");
        driver_check(DRIVER(cuMemAddressFree)(base_, bytes()), "cuMemAddressFree");
    }

    size_t each = 0;  // bytes of one segment

  private:
    CUmemAllocationProp of(Where kind) const {
        CUmemAllocationProp p{};
        p.type = CU_MEM_ALLOCATION_TYPE_PINNED;
        // Ranks in other processes map it.
        p.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        p.location.type = kind == Where::HOST ? CU_MEM_LOCATION_TYPE_HOST_NUMA : CU_MEM_LOCATION_TYPE_DEVICE;
        p.location.id = kind == Where::HOST ? node_ : device_;
        int rdma = 0;
        DRIVER(cuDeviceGetAttribute)(&rdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, device_);
        p.allocFlags.gpuDirectRDMACapable = kind == Where::GPU && rdma;
        return p;
    }

    std::vector<Where> kinds_;
    int device_ = 0, node_ = -1;
    CUdeviceptr base_ = 0;
};
