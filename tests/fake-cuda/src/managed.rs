//! Managed memory: one address for all. It stays where it is; what it is asked to do is counted.

use crate::world::{current, device_of, world, INVALID_CONTEXT};
use crate::{blocking, call, devices, give, in_context};
use oxygin_ffi::cuda::{CUdevice, CUdeviceptr, CUresult, CUstream, CUDA_ERROR_INVALID_VALUE, CUDA_SUCCESS};
use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Mutex;

/// What there is: address, and bytes.
static ALL: Mutex<Vec<(u64, usize)>> = Mutex::new(Vec::new());
static BROUGHT: AtomicU64 = AtomicU64::new(0);
/// The CPU cannot use it beside kernels.
static IS_MISSING: AtomicBool = AtomicBool::new(false);
/// It is made, and brought nowhere.
static STAYS: AtomicBool = AtomicBool::new(false);

fn all() -> std::sync::MutexGuard<'static, Vec<(u64, usize)>> {
    ALL.lock().unwrap_or_else(|e| e.into_inner())
}

/// Whether the CPU may use it while kernels run.
pub fn is_concurrent() -> bool {
    !IS_MISSING.load(Ordering::Relaxed)
}

/// Whether a range lies in one allocation.
fn holds(at: u64, bytes: usize) -> bool {
    all().iter().any(|&(base, len)| at >= base && at + bytes as u64 <= base + len as u64)
}

/// Frees what was allocated at an address, if anything was. `None`: nothing was.
pub fn free(at: u64) -> Option<()> {
    let mut all = all();
    let i = all.iter().position(|m| m.0 == at)?;
    all.swap_remove(i);
    drop(all);
    let bytes = world().unpin(at);
    if crate::kernel::use_memory(at, bytes) {
        world().violation("cuMemFree of managed memory that a launched kernel works on");
    }
    Some(())
}

#[no_mangle]
pub unsafe extern "C" fn cuMemAllocManaged(at: *mut CUdeviceptr, bytes: usize, flags: c_uint) -> CUresult {
    blocking!("cuMemAllocManaged");
    // CU_MEM_ATTACH_GLOBAL.
    if bytes == 0 || flags != 1 {
        return CUDA_ERROR_INVALID_VALUE;
    }
    let made = world().pin(current(), bytes) as u64;
    all().push((made, bytes));
    unsafe { give(at, made) }
}

#[no_mangle]
pub unsafe extern "C" fn cuMemAdvise(at: CUdeviceptr, bytes: usize, advice: c_int, device: CUdevice) -> CUresult {
    in_context!("cuMemAdvise");
    // CU_MEM_ADVISE_SET_ACCESSED_BY.
    match holds(at, bytes) && advice == 5 && (0..devices::COUNT).contains(&device) {
        true => CUDA_SUCCESS,
        false => CUDA_ERROR_INVALID_VALUE,
    }
}

#[no_mangle]
pub unsafe extern "C" fn cuMemPrefetchAsync(
    at: CUdeviceptr,
    bytes: usize,
    device: CUdevice,
    stream: CUstream,
) -> CUresult {
    in_context!("cuMemPrefetchAsync");
    let stays = STAYS.load(Ordering::Relaxed) || !is_concurrent();
    if stays || !holds(at, bytes) || bytes == 0 || device != device_of(current()) || stream.is_null() {
        return CUDA_ERROR_INVALID_VALUE;
    }
    BROUGHT.fetch_add(1, Ordering::Relaxed);
    CUDA_SUCCESS
}

/// Ranges that were brought to a GPU so far.
#[no_mangle]
pub extern "C" fn fake_brought() -> u64 {
    BROUGHT.load(Ordering::Relaxed)
}

/// Whether managed memory that is made is brought nowhere.
#[no_mangle]
pub extern "C" fn fake_set_staying(stays: bool) {
    STAYS.store(stays, Ordering::Relaxed);
}

/// Whether the CPU may use managed memory while kernels run; if not, none is brought anywhere either.
#[no_mangle]
pub extern "C" fn fake_set_managed(is_concurrent: bool) {
    IS_MISSING.store(!is_concurrent, Ordering::Relaxed);
}
