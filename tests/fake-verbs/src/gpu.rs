//! GPU memory: a fake CUDA driver in the same process says where it really is. Or it is a real GPU's, and somebody in
//! the same process carries bytes to it and from it (`tests/fake-gpudirect`).

use std::ffi::c_int;
use std::sync::{Mutex, PoisonError, RwLock};

/// Where `bytes` at an offset of a descriptor, or with descriptor -1 at an address, lie; NULL: no GPU memory.
type Resolve = extern "C" fn(c_int, u64, usize) -> *mut u8;
/// Copies bytes to the first address from the second one, of which at least one is a real GPU's; 0, or what failed.
type Carry = extern "C" fn(u64, u64, u64) -> c_int;

static RESOLVE: Mutex<Option<Resolve>> = Mutex::new(None);
/// Memory of real GPUs.
struct Real {
    carry: Option<Carry>,
    /// What has been resolved: addresses and bytes.
    ranges: Vec<(u64, u64)>,
}

static REAL: RwLock<Real> = RwLock::new(Real { carry: None, ranges: Vec::new() });

/// From here on devices ask `resolve` for every registration. "reset" ends that.
#[no_mangle]
pub extern "C" fn fake_verbs_gpu(resolve: Resolve) {
    set(Some(resolve));
}

/// What is resolved from here on is memory of real GPUs, which `carry` alone reaches.
#[no_mangle]
pub extern "C" fn fake_verbs_carry(carry: Carry) {
    REAL.write().unwrap_or_else(PoisonError::into_inner).carry = Some(carry);
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
    let host = get()?(fd, at, bytes) as u64;
    let mut real = REAL.write().unwrap_or_else(PoisonError::into_inner);
    let range = (host, bytes as u64);
    if host != 0 && real.carry.is_some() && !real.ranges.contains(&range) {
        real.ranges.push(range);
    }
    (host != 0).then_some(host)
}

/// Whether an address is a real GPU's.
pub fn is_real(at: u64) -> bool {
    let real = REAL.read().unwrap_or_else(PoisonError::into_inner);
    real.ranges.iter().any(|&(first, bytes)| at.wrapping_sub(first) < bytes)
}

/// Copies, if one of the two is a real GPU's. What cannot be carried ends the process: nobody would find out otherwise.
pub fn carry(from: u64, to: u64, bytes: u64) -> bool {
    let is_theirs = is_real(from) || is_real(to);
    if is_theirs && bytes > 0 {
        let carry = REAL.read().unwrap_or_else(PoisonError::into_inner).carry;
        let code = carry.map_or(-1, |carry| carry(to, from, bytes));
        if code != 0 {
            eprintln!("fake verbs: {bytes} bytes could not be carried from {from:#x} to {to:#x}: {code}");
            std::process::abort();
        }
    }
    is_theirs
}
