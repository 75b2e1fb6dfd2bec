//! Whether an operation may be started, and as what: its windows live, its ranges lie inside them, its signal is one.
//!
//! Everything that takes operations from outside goes through here, wherever it keeps its windows ([`Find`]). The
//! answer "no" has no reason, because looking for one would cost the good case; [`refusal`](super::refusal) goes
//! through the same arguments again.

use super::args::{AtomicArgs, GetArgs, PutArgs, SignalArgs};
use super::atomic::{Atomic, Atomics, Fetched, Width};
use super::op::{Get, Payload, Put, Signal, Value};
use crate::memory::window::{Remote, Window};
use crate::sys::handles;
use nccl_plugin_api::{SIGNAL_OP_ADD, SIGNAL_OP_INC};
use std::ffi::c_void;

/// Whether `size` bytes at `offset` are among `len`.
#[inline(always)]
pub fn inside(offset: u64, size: u64, len: u64) -> bool {
    offset <= len && size <= len - offset
}

/// A window of this rank's.
pub struct Local {
    /// First byte here.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// This rank's key.
    pub lkey: u32,
}

/// Where operations find windows by their handles. `None` for what is not live, or another communicator's.
///
/// # Safety
/// Of both functions: a set of contexts of the communicator lives during the call, and the rank is one of its ranks.
pub trait Find {
    /// A window of this rank's.
    ///
    /// # Safety
    /// As above.
    unsafe fn local(&self, handle: *mut c_void) -> Option<Local>;
    /// The window at a rank.
    ///
    /// # Safety
    /// As above.
    unsafe fn remote(&self, handle: *mut c_void, rank: u32) -> Option<Remote>;
}

/// All live windows of the communicator with this number.
pub struct Live(pub u64);

impl Live {
    /// What `read` finds in a window of this communicator.
    ///
    /// # Safety
    /// As for [`Find`].
    #[inline(always)]
    unsafe fn read<R>(&self, handle: *mut c_void, read: impl FnOnce(&Window) -> R) -> Option<R> {
        // SAFETY: a set of contexts keeps its communicator's windows in memory. A program that names another
        // communicator's does not close that meanwhile.
        unsafe { handles::read(handle, |w: &Window| (w.coll == self.0).then(|| read(w))) }.flatten()
    }

    /// A window here, and at a rank.
    ///
    /// # Safety
    /// As for [`Find`].
    pub unsafe fn ends(&self, handle: *mut c_void, rank: u32) -> Option<(Local, Remote)> {
        let here = |w: &Window| Local { base: w.base(), len: w.len(), lkey: w.lkey() };
        // SAFETY: passed on.
        unsafe { self.read(handle, |w| Some((here(w), w.remote().get(rank as usize)?.load()))) }.flatten()
    }
}

impl Find for Live {
    #[inline(always)]
    unsafe fn local(&self, handle: *mut c_void) -> Option<Local> {
        // SAFETY: passed on.
        unsafe { self.read(handle, |w| Local { base: w.base(), len: w.len(), lkey: w.lkey() }) }
    }

    #[inline(always)]
    unsafe fn remote(&self, handle: *mut c_void, rank: u32) -> Option<Remote> {
        // SAFETY: passed on; every window has an entry for each rank of its communicator.
        unsafe { self.read(handle, |w| w.remote().get_unchecked(rank as usize).load()) }
    }
}

/// Everything about a put but its context and rank, which exist.
///
/// # Safety
/// As for [`Find`].
#[inline(always)]
pub unsafe fn put(windows: &impl Find, a: &PutArgs) -> Option<Put> {
    let size = a.size as u64;
    let mut put = Put { local: 0, lkey: 0, rkey: 0, remote: 0, len: size, signal: None, more: a.more };
    if size != 0 || a.signal.is_none() {
        // SAFETY: passed on.
        let (src, dst) = unsafe { (windows.local(a.src.window)?, windows.remote(a.dst.window, a.rank)?) };
        if !inside(a.src.offset, size, src.len) || !inside(a.dst.offset, size, dst.len) {
            return None;
        }
        put.local = src.base + a.src.offset;
        put.lkey = src.lkey;
        put.remote = dst.base + a.dst.offset;
        put.rkey = dst.rkey;
    }
    if let Some(s) = &a.signal {
        // SAFETY: passed on.
        put.signal = Some(unsafe { signal(windows, s, a.rank)? });
    }
    Some(put)
}

/// The signal of a put to a rank that exists.
///
/// # Safety
/// As for [`Find`].
#[inline(always)]
unsafe fn signal(windows: &impl Find, s: &SignalArgs, rank: u32) -> Option<Signal> {
    // SAFETY: passed on.
    let to = unsafe { windows.remote(s.place.window, rank)? };
    let remote = to.base.wrapping_add(s.place.offset);
    let value = match s.op {
        SIGNAL_OP_ADD => s.value,
        SIGNAL_OP_INC => 1,
        _ => return None,
    };
    if !inside(s.place.offset, 8, to.len) || remote & 7 != 0 {
        return None;
    }
    Some(Signal { remote, rkey: to.rkey, value, strong: s.strong })
}

/// Everything about a put of `payload`, whose source `a` does not say, but its context and rank, which exist.
///
/// # Safety
/// As for [`Find`].
#[inline(always)]
pub unsafe fn value(windows: &impl Find, payload: Payload, a: &PutArgs) -> Option<Value> {
    // SAFETY: passed on.
    let dst = unsafe { windows.remote(a.dst.window, a.rank)? };
    if !inside(a.dst.offset, payload.bytes().len() as u64, dst.len) {
        return None;
    }
    let mut value = Value { payload, rkey: dst.rkey, remote: dst.base + a.dst.offset, signal: None, more: a.more };
    if let Some(s) = &a.signal {
        // SAFETY: passed on.
        value.signal = Some(unsafe { signal(windows, s, a.rank)? });
    }
    Some(value)
}

/// Everything about a get but its context and rank, which exist.
///
/// # Safety
/// As for [`Find`].
#[inline(always)]
pub unsafe fn get(windows: &impl Find, a: &GetArgs) -> Option<Get> {
    // SAFETY: passed on.
    let (remote, local) = unsafe { (windows.remote(a.remote.window, a.rank)?, windows.local(a.local.window)?) };
    let size = a.size as u64;
    if !inside(a.remote.offset, size, remote.len) || !inside(a.local.offset, size, local.len) {
        return None;
    }
    Some(Get {
        local: local.base + a.local.offset,
        lkey: local.lkey,
        rkey: remote.rkey,
        remote: remote.base + a.remote.offset,
        len: size,
        more: a.more,
    })
}

/// From where to where a device reads and writes for an atomic operation on the word at `remote`, which is in memory.
pub(super) fn around(remote: u64, bytes: u64, atomics: &Atomics) -> (u64, u64) {
    match atomics.by_words {
        true => (remote & !7, (remote & !7).saturating_add(8)),
        false => (remote, remote.saturating_add(bytes)),
    }
}

/// Everything about an atomic operation but its context and rank, which exist; `atomics`: what that context carries
/// out.
///
/// # Safety
/// As for [`Find`].
pub unsafe fn atomic(windows: &impl Find, atomics: &Atomics, a: &AtomicArgs) -> Option<Atomic> {
    let width = Width::of(a.width).filter(|&width| atomics.any() && a.change.fits(width))?;
    let (bytes, is_aligned) = (width.bytes(), |at: u64| at % width.bytes() == 0);
    // SAFETY: passed on.
    let to = unsafe { windows.remote(a.remote.window, a.rank)? };
    let remote = to.base.wrapping_add(a.remote.offset);
    let (begins, ends) = around(remote, bytes, atomics);
    let is_whole = begins >= to.base && ends - to.base <= to.len;
    if !inside(a.remote.offset, bytes, to.len) || !is_aligned(remote) || !is_whole {
        return None;
    }
    let fetched = match &a.fetched {
        None => None,
        Some(place) => {
            // SAFETY: passed on.
            let here = unsafe { windows.local(place.window)? };
            let local = here.base.wrapping_add(place.offset);
            if !inside(place.offset, bytes, here.len) || !is_aligned(local) {
                return None;
            }
            Some(Fetched { local, lkey: here.lkey })
        }
    };
    Some(Atomic { change: a.change, width, remote, rkey: to.rkey, fetched, more: a.more })
}

#[cfg(test)]
mod tests;
