//! GPU memory: a fake CUDA driver in the same process says where it really is.

use std::ffi::c_int;
use std::sync::{Mutex, PoisonError};

/// Where `bytes` at an offset of a descriptor, or with descriptor -1 at an address, lie; NULL: no GPU memory.
type Resolve = extern "C" fn(c_int, u64, usize) -> *mut u8;

static RESOLVE: Mutex<Option<Resolve>> = Mutex::new(None);

/// From here on devices ask `resolve` for every registration. "reset" ends that.
#[no_mangle]
pub extern "C" fn fake_verbs_gpu(resolve: Resolve) {
    set(Some(resolve));
}

/// Nobody knows of GPU memory any more.
pub fn forget() {
    set(None);
}

fn set(resolve: Option<Resolve>) {
    *RESOLVE.lock().unwrap_or_else(PoisonError::into_inner) = resolve;
}

fn get() -> Option<Resolve> {
    *RESOLVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether anybody knows of GPU memory.
pub fn is_known() -> bool {
    get().is_some()
}

/// Where GPU memory really is.
pub fn resolve(fd: c_int, at: u64, bytes: usize) -> Option<u64> {
    let host = get()?(fd, at, bytes);
    (!host.is_null()).then_some(host as u64)
}
