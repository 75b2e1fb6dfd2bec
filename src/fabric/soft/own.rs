//! Operations to oneself, both ends in host memory.

use super::atomic::change;
use super::local;
use super::sentences::gone;
use crate::error::{Error, Result};
use crate::memory::registry::{Held, Registry};
use crate::rma::atomic::Atomic;
use crate::rma::op::{Op, Transfer};

/// One step of an operation of `rank` to itself, of which `done` bytes are moved: `n` more, or with `n` 0 its signal.
/// Returns the bytes; `None`: it is complete.
pub fn step(registry: &Registry, rank: u32, work: &Op, done: u64, n: u64) -> Result<Option<u64>> {
    let held = registry.hold();
    let missing = || Error::remote_access(gone(rank));
    local::check(&held, work, done, n)?;
    match work.transfer() {
        Transfer::Put(put) if n > 0 => {
            let to = held.resolve(put.rkey, put.remote + done, n).ok_or_else(missing)?;
            // SAFETY: both ends are inside held windows; they may overlap.
            unsafe { std::ptr::copy((put.local + done) as *const u8, to, n as usize) };
            Ok(Some(n))
        }
        Transfer::Put(put) => match &put.signal {
            Some(s) if !held.add(s.rkey, s.remote, s.value) => Err(missing()),
            _ => Ok(None),
        },
        Transfer::Get(get) if n > 0 => {
            let from = held.resolve(get.rkey, get.remote + done, n).ok_or_else(missing)?;
            // SAFETY: both ends are inside held windows.
            unsafe { std::ptr::copy(from, (get.local + done) as *mut u8, n as usize) };
            Ok(Some(n))
        }
        Transfer::Get(_) => Ok(None),
        Transfer::Atomic(atomic) => fetch(&held, &atomic).map(|()| None).ok_or_else(missing),
    }
}

/// An atomic operation. `None`: the word is in no window.
fn fetch(held: &Held<'_>, atomic: &Atomic) -> Option<()> {
    let width = atomic.width;
    let at = held.resolve(atomic.rkey, atomic.remote, width.bytes()).filter(|_| atomic.remote % width.bytes() == 0)?;
    // SAFETY: an aligned word inside a window that is held.
    let old = unsafe { change(at, &atomic.change, width) };
    if let Some(fetched) = atomic.fetched {
        // SAFETY: writable (Context::post); x86 has the low bytes first.
        unsafe {
            std::ptr::copy_nonoverlapping((&raw const old).cast(), fetched.local as *mut u8, width.bytes() as usize)
        };
    }
    Some(())
}
