//! Contexts that the code under test makes for itself, beside each device's primary one, and device memory in them.

use crate::world::{current, device_of, world, INVALID_CONTEXT, POP, PUSH};
use crate::{blocking, call, devices, event, give, in_context, stream};
use oxygin_ffi::cuda::*;
use std::ffi::c_uint;

/// `CUDA_ERROR_INVALID_DEVICE`.
const INVALID_DEVICE: CUresult = 101;

#[no_mangle]
pub unsafe extern "C" fn cuCtxCreate_v2(context: *mut CUcontext, _flags: c_uint, device: CUdevice) -> CUresult {
    call!("cuCtxCreate");
    if world().kernels() > 0 {
        world().violation("cuCtxCreate while a kernel runs");
    }
    if crate::world::spoils_captures() {
        world().violation("cuCtxCreate while a stream is captured");
    }
    if !(0..devices::COUNT).contains(&device) {
        return INVALID_DEVICE;
    }
    let made = world().create_context(device);
    PUSH(made);
    unsafe { give(context, made as CUcontext) }
}

#[no_mangle]
pub unsafe extern "C" fn cuCtxDestroy_v2(context: CUcontext) -> CUresult {
    call!("cuCtxDestroy");
    let context = context as usize;
    if world().kernels() > 0 {
        world().violation("cuCtxDestroy while a kernel runs");
    }
    if !world().forget_context(context) {
        world().violation("cuCtxDestroy of a context that was not created, or is destroyed");
        return INVALID_CONTEXT;
    }
    let (streams, events) = (stream::live_in(context), event::live_in(context));
    let memory = world().memory_in(context);
    if streams + events + memory > 0 {
        let what = format!("{streams} streams, {events} events and {memory} pieces of memory");
        world().violation(&format!("cuCtxDestroy with {what} in it"));
    }
    if current() == context {
        POP();
    }
    CUDA_SUCCESS
}

#[no_mangle]
pub unsafe extern "C" fn cuCtxSetLimit(limit: c_uint, _value: usize) -> CUresult {
    in_context!("cuCtxSetLimit");
    if limit == CU_LIMIT_STACK_SIZE {
        CUDA_SUCCESS
    } else {
        CUDA_ERROR_INVALID_VALUE
    }
}

#[no_mangle]
pub unsafe extern "C" fn cuMemAlloc_v2(at: *mut CUdeviceptr, bytes: usize) -> CUresult {
    blocking!("cuMemAlloc");
    if bytes == 0 {
        return CUDA_ERROR_INVALID_VALUE;
    }
    unsafe { give(at, world().alloc_in(current(), device_of(current()), bytes)) }
}

#[no_mangle]
pub unsafe extern "C" fn cuMemFree_v2(at: CUdeviceptr) -> CUresult {
    blocking!("cuMemFree");
    if crate::managed::free(at).is_none() && !world().free(at) {
        world().violation("cuMemFree of memory that cuMemAlloc did not make, or of freed memory");
        return CUDA_ERROR_INVALID_VALUE;
    }
    CUDA_SUCCESS
}
