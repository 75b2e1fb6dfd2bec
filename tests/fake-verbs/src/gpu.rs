//! GPU memory: a fake CUDA driver in the same process says where it really is. Or it is a real GPU's, and somebody in
//! the same process carries bytes to it and from it (`tests/fake-gpudirect`).

use std::ffi::c_int;
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

/// Where `bytes` at an offset of a descriptor, or with descriptor -1 at an address, lie; NULL: no GPU memory.
type Resolve = extern "C" fn(c_int, u64, usize) -> *mut u8;
/// Copies bytes to the first address from the second one, of which at least one is a real GPU's; 0, or what failed.
type Carry = extern "C" fn(u64, u64, u64) -> c_int;

/// What is known of GPU memory.
struct Known {
    resolve: Option<Resolve>,
    carry: Option<Carry>,
    /// Of real GPUs, what has been resolved: addresses and bytes.
    ranges: Vec<(u64, u64)>,
}

impl Known {
    const NOTHING: Self = Self { resolve: None, carry: None, ranges: Vec::new() };

    fn is_real(&self, at: u64) -> bool {
        self.ranges.iter().any(|&(first, bytes)| at.wrapping_sub(first) < bytes)
    }
}

static KNOWN: RwLock<Known> = RwLock::new(Known::NOTHING);

fn known() -> RwLockReadGuard<'static, Known> {
    KNOWN.read().unwrap_or_else(PoisonError::into_inner)
}

fn change() -> RwLockWriteGuard<'static, Known> {
    KNOWN.write().unwrap_or_else(PoisonError::into_inner)
}

/// From here on devices ask `resolve` for every registration. "reset" ends that.
#[no_mangle]
pub extern "C" fn fake_verbs_gpu(resolve: Resolve) {
    change().resolve = Some(resolve);
}

/// What is resolved from here on is memory of real GPUs, which `carry` alone reaches. "reset" ends that, too.
#[no_mangle]
pub extern "C" fn fake_verbs_carry(carry: Carry) {
    change().carry = Some(carry);
}

/// Nobody knows of GPU memory any more.
pub fn forget() {
    *change() = Known::NOTHING;
}

/// Whether anybody knows of GPU memory.
pub fn is_known() -> bool {
    known().resolve.is_some()
}

/// Where GPU memory really is.
pub fn resolve(fd: c_int, at: u64, bytes: usize) -> Option<u64> {
    let resolve = known().resolve?;
    let host = resolve(fd, at, bytes) as u64;
    let mut known = change();
    let range = (host, bytes as u64);
    if host != 0 && known.carry.is_some() && !known.ranges.contains(&range) {
        known.ranges.push(range);
    }
    (host != 0).then_some(host)
}

/// Whether an address is a real GPU's.
pub fn is_real(at: u64) -> bool {
    known().is_real(at)
}

/// Copies, if one of the two is a real GPU's. What cannot be carried ends the process: nobody would find out otherwise.
pub fn carry(from: u64, to: u64, bytes: u64) -> bool {
    let carry = {
        let known = known();
        known.carry.filter(|_| known.is_real(from) || known.is_real(to))
    };
    let Some(carry) = carry else { return false };
    let code = if bytes > 0 { carry(to, from, bytes) } else { 0 };
    if code != 0 {
        eprintln!("fake verbs: {bytes} bytes could not be carried from {from:#x} to {to:#x}: {code}");
        std::process::abort();
    }
    true
}
