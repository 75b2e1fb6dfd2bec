//! The GPUs of this driver, as tools list them.

use crate::world;
use oxygin_ffi::cuda::{CUdevice, CUresult, CUDA_ERROR_INVALID_VALUE, CUDA_SUCCESS};
use std::ffi::{c_char, c_int};

/// How many there are.
pub const COUNT: c_int = 4;

#[no_mangle]
pub unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> CUresult {
    unsafe { count.write(COUNT) };
    CUDA_SUCCESS
}

/// Of every pair the same: they are as GPUs with NVLink.
#[no_mangle]
pub unsafe extern "C" fn cuDeviceGetP2PAttribute(
    value: *mut c_int,
    _which: c_int,
    _from: CUdevice,
    _to: CUdevice,
) -> CUresult {
    world().count("cuDeviceGetP2PAttribute");
    unsafe { value.write(1) };
    CUDA_SUCCESS
}

#[no_mangle]
pub unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, room: c_int, _device: CUdevice) -> CUresult {
    let text = c"Fake GPU";
    if (room as usize) < text.count_bytes() + 1 {
        return CUDA_ERROR_INVALID_VALUE;
    }
    unsafe { name.copy_from_nonoverlapping(text.as_ptr(), text.count_bytes() + 1) };
    CUDA_SUCCESS
}
