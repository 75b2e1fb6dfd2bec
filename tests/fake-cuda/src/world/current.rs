//! Which context a thread is in, and whether its calls spoil captures.

use super::world;
use oxygin_ffi::cuda::{CUcontext, CUdevice, CUresult, CU_STREAM_CAPTURE_MODE_RELAXED};
use std::cell::{Cell, RefCell};
use std::ffi::c_uint;
use std::sync::atomic::{AtomicBool, Ordering};

/// `CUDA_ERROR_INVALID_CONTEXT`.
pub const INVALID_CONTEXT: CUresult = 201;
/// Primary contexts, 16 apart, one a device; the `n`-th that is created lies `n` times [`GENERATION`] behind its
/// device's.
const FIRST_CONTEXT: usize = 0xc0de_0000;
pub(super) const GENERATION: usize = 0x1000;

/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`.
pub const CAPTURE_UNSUPPORTED: CUresult = 900;
/// The application captures a stream.
pub static CAPTURED: AtomicBool = AtomicBool::new(false);

/// Whether a call of this thread spoils captures of others.
pub fn spoils_captures() -> bool {
    CAPTURED.load(Ordering::SeqCst) && MODE.get() != CU_STREAM_CAPTURE_MODE_RELAXED
}

pub fn exchange_capture_mode(mode: c_uint) -> c_uint {
    MODE.replace(mode)
}

thread_local! {
    static MODE: Cell<c_uint> = const { Cell::new(0) };
    static STACK: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// The calling thread's context, 0 for none.
pub fn current() -> usize {
    STACK.with_borrow(|s| s.last().copied().unwrap_or(0))
}

#[allow(non_snake_case)]
pub fn PUSH(context: usize) {
    STACK.with_borrow_mut(|s| s.push(context));
}

#[allow(non_snake_case)]
pub fn POP() -> usize {
    match STACK.with_borrow_mut(Vec::pop) {
        Some(context) => context,
        None => {
            world().violation("cuCtxPopCurrent without a push");
            0
        }
    }
}

pub fn context_of(device: CUdevice) -> CUcontext {
    (FIRST_CONTEXT + device as usize * 16) as CUcontext
}

/// Of any context, also of a destroyed one.
pub fn device_of(context: usize) -> CUdevice {
    ((context - FIRST_CONTEXT) % GENERATION / 16) as CUdevice
}

/// Whether a context is a device's primary one.
pub fn is_primary(context: usize) -> bool {
    (FIRST_CONTEXT..FIRST_CONTEXT + GENERATION).contains(&context)
}
