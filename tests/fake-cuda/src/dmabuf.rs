//! Device memory as descriptors. One is an empty file that says which range it stands for; an RDMA device of the tests
//! asks [`fake_resolve`] where that lies.

use crate::world::{current, device_of, world, INVALID_CONTEXT};
use oxygin_ffi::cuda::*;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::sync::atomic::{AtomicI32, Ordering};

/// First in the file.
const MAGIC: u64 = u64::from_le_bytes(*b"dma-buf!");
const PAGE: u64 = 4096;

/// What [`fake_dma_buf`] chose.
static MODE: AtomicI32 = AtomicI32::new(0);

/// Memory is exported (0), the device says that it is not (1), ranges are refused (2), or are unless they are to be
/// mapped over PCIe (3), or are because memory was allocated without a thought of RDMA (4), or are exported for every
/// mapping (5).
#[no_mangle]
pub extern "C" fn fake_dma_buf(mode: c_int) {
    MODE.store(mode, Ordering::Release);
}

/// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED`.
pub fn is_supported() -> bool {
    MODE.load(Ordering::Acquire) != 1
}

/// `CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE`.
pub fn is_rdma_capable() -> bool {
    MODE.load(Ordering::Acquire) != 4
}

#[no_mangle]
pub unsafe extern "C" fn cuMemGetHandleForAddressRange(
    handle: *mut c_void,
    at: CUdeviceptr,
    bytes: usize,
    kind: c_uint,
    flags: c_ulonglong,
) -> CUresult {
    if current() == 0 {
        world().violation("cuMemGetHandleForAddressRange without a current context");
        return INVALID_CONTEXT;
    }
    let over_pcie = flags == CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE;
    let refused = match MODE.load(Ordering::Acquire) {
        1 => return CUDA_ERROR_NOT_SUPPORTED,
        2 | 4 => true,
        3 => !over_pcie,
        5 => false,
        _ => over_pcie,
    };
    let whole_pages = at % PAGE == 0 && bytes as u64 % PAGE == 0 && bytes > 0;
    let Some(memory) = world().find(at, bytes).filter(|_| whole_pages) else { return CUDA_ERROR_INVALID_VALUE };
    if refused || kind != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if memory.device != device_of(current()) {
        world().violation("a range is exported in the context of another GPU");
    }
    let words = [MAGIC, at, bytes as u64];
    unsafe {
        let fd = libc::memfd_create(c"dma-buf".as_ptr(), libc::MFD_CLOEXEC);
        assert!(fd >= 0 && libc::pwrite(fd, words.as_ptr().cast(), 24, 0) == 24);
        handle.cast::<c_int>().write(fd);
    }
    CUDA_SUCCESS
}

/// Where the GPU sees `bytes` at offset `at` of a descriptor, or at the address `at` when `fd` is -1; NULL: they are no
/// device memory.
#[no_mangle]
pub extern "C" fn fake_resolve(fd: c_int, at: u64, bytes: usize) -> *mut u8 {
    let mut address = Some(at);
    if fd != -1 {
        let mut words = [0u64; 3];
        let read = unsafe { libc::pread(fd, words.as_mut_ptr().cast(), 24, 0) };
        let inside = at.checked_add(bytes as u64).is_some_and(|end| end <= words[2]);
        address = (read == 24 && words[0] == MAGIC && inside).then(|| words[1] + at);
    }
    let found = address.and_then(|a| world().find(a, bytes).map(|m| m.at(a)));
    found.unwrap_or(std::ptr::null_mut())
}
