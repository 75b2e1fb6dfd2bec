//! Registers of other devices that are mapped for GPUs. They have another address there, so that what was meant for
//! kernels and what for the CPU is told apart.

use crate::world::{current, world, INVALID_CONTEXT};
use crate::{blocking, call, give, in_context};
use oxygin_ffi::cuda::*;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::Mutex;

const PAGE: u64 = 4096;
/// What is added to an address for kernels.
const FOR_KERNELS: u64 = 1 << 60;
const HOST_MEMORY_ALREADY_REGISTERED: CUresult = 712;
const HOST_MEMORY_NOT_REGISTERED: CUresult = 713;

/// First page behind each, by its first byte.
static MAPPED: Mutex<BTreeMap<u64, u64>> = Mutex::new(BTreeMap::new());

/// What mapping one fails with; 0: it does not.
static REFUSED: AtomicI32 = AtomicI32::new(0);

/// From here on mapping one fails with this; 0: it does not.
#[no_mangle]
pub extern "C" fn fake_refuse_registers(code: c_int) {
    REFUSED.store(code, Ordering::Relaxed);
}

fn page(at: u64) -> u64 {
    at & !(PAGE - 1)
}

#[no_mangle]
pub unsafe extern "C" fn cuMemHostRegister_v2(host: *mut c_void, bytes: usize, flags: c_uint) -> CUresult {
    blocking!("cuMemHostRegister");
    let (at, all) = (host as u64, CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP);
    if bytes == 0 || flags != all | CU_MEMHOSTREGISTER_IOMEMORY {
        world().violation("cuMemHostRegister of something that is no device's register");
        return CUDA_ERROR_INVALID_VALUE;
    }
    match REFUSED.load(Ordering::Relaxed) {
        0 => {}
        code => return code as CUresult,
    }
    let end = page(at + bytes as u64 + PAGE - 1);
    let mut mapped = MAPPED.lock().unwrap();
    if mapped.iter().any(|(begin, behind)| page(*begin) < end && page(at) < *behind) {
        return HOST_MEMORY_ALREADY_REGISTERED;
    }
    mapped.insert(at, end);
    CUDA_SUCCESS
}

#[no_mangle]
pub unsafe extern "C" fn cuMemHostUnregister(host: *mut c_void) -> CUresult {
    blocking!("cuMemHostUnregister");
    match MAPPED.lock().unwrap().remove(&(host as u64)) {
        Some(_) => CUDA_SUCCESS,
        None => HOST_MEMORY_NOT_REGISTERED,
    }
}

/// Pinned memory has one address for all.
#[no_mangle]
pub unsafe extern "C" fn cuMemHostGetDevicePointer_v2(at: *mut CUdeviceptr, host: *mut c_void, _f: c_uint) -> CUresult {
    let host = host as u64;
    let is_register = MAPPED.lock().unwrap().contains_key(&host);
    unsafe { give(at, if is_register { host | FOR_KERNELS } else { host }) }
}

/// Where this process sees a register that kernels see at `at`; 0: there is none.
#[no_mangle]
pub extern "C" fn fake_register(at: u64) -> u64 {
    let host = at & !FOR_KERNELS;
    let mapped = MAPPED.lock().unwrap();
    let before = mapped.range(..=host).next_back();
    let is_register = at & FOR_KERNELS != 0 && before.is_some_and(|(_, behind)| host < *behind);
    if is_register {
        host
    } else {
        0
    }
}

/// Whether kernels see pinned memory at `at`.
#[no_mangle]
pub extern "C" fn fake_is_pinned(at: u64) -> bool {
    world().is_pinned(at, 8)
}

/// How many there are.
#[no_mangle]
pub extern "C" fn fake_registers() -> usize {
    MAPPED.lock().unwrap().len()
}
