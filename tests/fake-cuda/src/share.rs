//! Virtual memory management and memory of other processes. Which calls wait for kernels was tried on a real driver
//! (580.159, H200): only closing IPC memory does.

use crate::memory::{Bytes, Kind, Memory, Range, HOST};
use crate::world::{current, world, Physical, INVALID_CONTEXT};
use crate::{blocking, call, give, in_context};
use oxygin_ffi::cuda::*;
use std::ffi::{c_int, c_ulonglong, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd};

/// `CUDA_ERROR_NOT_FOUND`.
const NOT_FOUND: CUresult = 500;
/// `CUDA_ERROR_OUT_OF_MEMORY`.
const CUDA_ERROR_OUT_OF_MEMORY: CUresult = 2;
/// What a device has, for each allocation.
const DEVICE_BYTES: usize = 2 << 30;
/// Of mappings; smaller than a real one, so that tests are.
pub const GRANULARITY: usize = 65_536;

#[no_mangle]
pub unsafe extern "C" fn cuMemGetAddressRange_v2(base: *mut u64, size: *mut usize, at: CUdeviceptr) -> CUresult {
    in_context!("cuMemGetAddressRange");
    let Some(found) = world().find(at, 1) else { return NOT_FOUND };
    unsafe {
        give(base, found.base);
        give(size, found.bytes)
    }
}

#[no_mangle]
pub unsafe extern "C" fn cuMemCreate(
    handle: *mut CUmemHandle,
    size: usize,
    properties: *const CUmemAllocationProp,
    _flags: c_ulonglong,
) -> CUresult {
    blocking!("cuMemCreate");
    let properties = unsafe { *properties };
    if size == 0 || size % GRANULARITY != 0 || properties.kind != CU_MEM_ALLOCATION_TYPE_PINNED {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if size > DEVICE_BYTES {
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    let device = match properties.location.kind {
        CU_MEM_LOCATION_TYPE_HOST_NUMA => HOST,
        _ => properties.location.id,
    };
    let bytes = Bytes::new(device, size, properties.requested_handle_types);
    unsafe { give(handle, world().add_physical(bytes)) }
}

#[no_mangle]
pub unsafe extern "C" fn cuMemGetAllocationGranularity(
    granularity: *mut usize,
    _properties: *const CUmemAllocationProp,
    _option: c_int,
) -> CUresult {
    call!("cuMemGetAllocationGranularity");
    unsafe { give(granularity, GRANULARITY) }
}

#[no_mangle]
pub unsafe extern "C" fn cuMemRelease(handle: CUmemHandle) -> CUresult {
    call!("cuMemRelease");
    if !world().release(handle) {
        world().violation("cuMemRelease of a handle that is none");
        return CUDA_ERROR_INVALID_VALUE;
    }
    CUDA_SUCCESS
}

#[no_mangle]
pub unsafe extern "C" fn cuMemRetainAllocationHandle(handle: *mut CUmemHandle, at: *mut c_void) -> CUresult {
    call!("cuMemRetainAllocationHandle");
    let mut world = world();
    match world.find(at as u64, 1).filter(|m| m.kind == Kind::Mapped) {
        Some(memory) => unsafe { give(handle, world.retain(memory.of)) },
        None => CUDA_ERROR_INVALID_VALUE,
    }
}

#[no_mangle]
pub unsafe extern "C" fn cuMemGetAllocationPropertiesFromHandle(
    properties: *mut CUmemAllocationProp,
    handle: CUmemHandle,
) -> CUresult {
    call!("cuMemGetAllocationPropertiesFromHandle");
    let mut world = world();
    let Some(Physical { bytes, .. }) = world.physical(handle) else { return CUDA_ERROR_INVALID_VALUE };
    let made = CUmemAllocationProp {
        kind: CU_MEM_ALLOCATION_TYPE_PINNED,
        requested_handle_types: bytes.handle_types,
        location: match bytes.device {
            HOST => CUmemLocation { kind: CU_MEM_LOCATION_TYPE_HOST_NUMA, id: 0 },
            id => CUmemLocation { kind: CU_MEM_LOCATION_TYPE_DEVICE, id },
        },
        win32: std::ptr::null_mut(),
        flags: [0; 8],
    };
    unsafe { give(properties, made) }
}

#[no_mangle]
pub unsafe extern "C" fn cuMemExportToShareableHandle(
    place: *mut c_void,
    handle: CUmemHandle,
    kind: c_int,
    _flags: c_ulonglong,
) -> CUresult {
    call!("cuMemExportToShareableHandle");
    let mut world = world();
    let Some(Physical { bytes, .. }) = world.physical(handle) else { return CUDA_ERROR_INVALID_VALUE };
    if kind != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || bytes.handle_types & kind == 0 {
        return CUDA_ERROR_INVALID_VALUE;
    }
    match bytes.fd.try_clone() {
        Ok(fd) => unsafe { give(place.cast::<c_int>(), fd.into_raw_fd()) },
        Err(_) => CUDA_ERROR_INVALID_VALUE,
    }
}

#[no_mangle]
pub unsafe extern "C" fn cuMemImportFromShareableHandle(
    handle: *mut CUmemHandle,
    fd: *mut c_void,
    kind: c_int,
) -> CUresult {
    call!("cuMemImportFromShareableHandle");
    let fd = unsafe { BorrowedFd::borrow_raw(fd as usize as c_int) };
    match Bytes::open(fd).filter(|b| b.handle_types & kind != 0) {
        Some(bytes) => unsafe { give(handle, world().import(bytes)) },
        None => CUDA_ERROR_INVALID_VALUE,
    }
}

#[no_mangle]
pub unsafe extern "C" fn cuMemAddressReserve(
    at: *mut CUdeviceptr,
    size: usize,
    _alignment: usize,
    _wanted: CUdeviceptr,
    _flags: c_ulonglong,
) -> CUresult {
    call!("cuMemAddressReserve");
    if size == 0 || size % GRANULARITY != 0 {
        return CUDA_ERROR_INVALID_VALUE;
    }
    let range = Range::reserve(size);
    world().ranges().push(range);
    unsafe { give(at, range.base) }
}

#[no_mangle]
pub unsafe extern "C" fn cuMemAddressFree(at: CUdeviceptr, size: usize) -> CUresult {
    in_context!("cuMemAddressFree");
    let mut world = world();
    let Some(i) = world.ranges().iter().position(|r| r.base == at && r.bytes == size) else {
        world.violation("cuMemAddressFree of a range that is none");
        return CUDA_ERROR_INVALID_VALUE;
    };
    if (0..size / GRANULARITY).any(|n| world.find(at + (n * GRANULARITY) as u64, 1).is_some()) {
        world.violation("cuMemAddressFree of a range with mappings");
        return CUDA_ERROR_INVALID_VALUE;
    }
    world.ranges().swap_remove(i).free();
    CUDA_SUCCESS
}

#[no_mangle]
pub unsafe extern "C" fn cuMemMap(
    at: CUdeviceptr,
    size: usize,
    offset: usize,
    handle: CUmemHandle,
    _flags: c_ulonglong,
) -> CUresult {
    in_context!("cuMemMap");
    let mut world = world();
    let range = world.ranges().iter().find(|r| r.holds(at, size)).copied();
    let (Some(range), true) = (range, world.find(at, 1).is_none()) else { return CUDA_ERROR_INVALID_VALUE };
    let Some(Physical { bytes, .. }) = world.physical(handle) else { return CUDA_ERROR_INVALID_VALUE };
    if offset != 0 || size == 0 || size % GRANULARITY != 0 || size > bytes.bytes {
        return CUDA_ERROR_INVALID_VALUE;
    }
    range.map(at, size, bytes);
    let device = bytes.device;
    let of = world.retain(handle);
    // Nobody, until access is set.
    let only = Some(0);
    world.add(Memory { base: at, bytes: size, range, device, only, managed: false, access: 0, of, kind: Kind::Mapped });
    CUDA_SUCCESS
}

#[no_mangle]
pub unsafe extern "C" fn cuMemUnmap(at: CUdeviceptr, size: usize) -> CUresult {
    in_context!("cuMemUnmap");
    let mut world = world();
    let Some(memory) = world.remove(|m| m.kind == Kind::Mapped && m.base == at && m.bytes == size) else {
        world.violation("cuMemUnmap of a mapping that is none");
        return CUDA_ERROR_INVALID_VALUE;
    };
    memory.range.unmap(at, size);
    world.release(memory.of);
    CUDA_SUCCESS
}

#[no_mangle]
pub unsafe extern "C" fn cuMemSetAccess(
    at: CUdeviceptr,
    size: usize,
    access: *const CUmemAccessDesc,
    count: usize,
) -> CUresult {
    in_context!("cuMemSetAccess");
    let access = unsafe { *access };
    if count != 1 || access.flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE {
        return CUDA_ERROR_INVALID_VALUE;
    }
    let (mut from, end) = (at, at + size as u64);
    if access.location.kind == CU_MEM_LOCATION_TYPE_HOST_NUMA {
        // The CPUs see host memory anyhow, and no other.
        return match world().find(at, size).is_some_and(|memory| memory.device == HOST) {
            true => CUDA_SUCCESS,
            false => CUDA_ERROR_NOT_SUPPORTED,
        };
    }
    while from < end {
        let Some(next) = world().allow(from, access.location.id) else { return CUDA_ERROR_INVALID_VALUE };
        from = next;
    }
    CUDA_SUCCESS
}

// What tests use.

/// Allocations of `sizes` side by side: exportable and mapped for every GPU, as ncclMemAlloc's are, or neither.
#[no_mangle]
pub unsafe extern "C" fn fake_alloc_segments(device: c_int, sizes: *const usize, n: usize, exportable: bool) -> u64 {
    let sizes = unsafe { std::slice::from_raw_parts(sizes, n) };
    let total: usize = sizes.iter().sum();
    assert!(sizes.iter().all(|s| s % GRANULARITY == 0));
    let range = Range::reserve(total);
    let mut world = world();
    world.ranges().push(range);
    let mut base = range.base;
    for &bytes in sizes {
        let memory = Bytes::new(device, bytes, exportable as c_int);
        range.map(base, bytes, &memory);
        let of = world.add_physical(memory);
        let only = (!exportable).then_some(1 << device);
        world.add(Memory { base, bytes, range, device, only, managed: false, access: 0, of, kind: Kind::Mapped });
        base += bytes as u64;
    }
    range.base
}

/// Memory on a NUMA node that can be exported, mapped for the CPUs and for the GPUs with a bit in `who`.
#[no_mangle]
pub extern "C" fn fake_alloc_host(bytes: usize, who: u64) -> u64 {
    assert!(bytes % GRANULARITY == 0);
    let range = Range::reserve(bytes);
    let mut world = world();
    world.ranges().push(range);
    let memory = Bytes::new(HOST, bytes, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    range.map(range.base, bytes, &memory);
    let of = world.add_physical(memory);
    let (base, device, only, kind) = (range.base, HOST, Some(who), Kind::Mapped);
    world.add(Memory { base, bytes, range, device, only, managed: false, access: 0, of, kind });
    base
}

/// How much memory of other processes is mapped.
#[no_mangle]
pub extern "C" fn fake_foreign() -> usize {
    world().foreign()
}

/// How many stores and additions this process's streams have made.
#[no_mangle]
pub extern "C" fn fake_stores() -> usize {
    world().stores()
}

/// How many copies this process's streams have made.
#[no_mangle]
pub extern "C" fn fake_copies() -> usize {
    world().copies()
}
