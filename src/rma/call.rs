//! From the arguments of a table call to a checked operation.
//!
//! Three ways, each of which the one before falls back on: a put with a signal between the same windows as the last one
//! ([`put_again`]), a put over verbs whose windows are where the data path looks first ([`fast_put`]), and everything else.
//! The first two say nothing when they do not take an operation.

use super::args::{GetArgs, LatePut, PutArgs};
use super::contexts::Contexts;
use super::op::{Get, Put, Signal};
use super::seq::Seq;
use super::ticket::Ticket;
use super::{explain, lanes, sets};
use crate::comm::coll::Coll;
use crate::error::Result;
use crate::fabric::verbs::{Short, Side, Windows};
use crate::handles;
use crate::memory::cache;
use crate::memory::window::{Remote, Window};
use nccl_plugin_api::{SIGNAL_OP_ADD, SIGNAL_OP_INC};
use std::ffi::c_void;

/// Whether `size` bytes at `offset` are among `len`.
#[inline(always)]
pub(super) fn inside(offset: u64, size: u64, len: u64) -> bool {
    offset <= len && size <= len - offset
}

/// A window of this rank's.
struct Local {
    base: u64,
    len: u64,
    lkey: u32,
}

/// Where operations find windows by their handles. `None` for what is not live, or another communicator's.
///
/// # Safety
/// Of both functions: as for [`handles::get`], and the rank is one of the communicator's.
trait Find {
    unsafe fn local(&self, handle: *mut c_void) -> Option<Local>;
    unsafe fn remote(&self, handle: *mut c_void, rank: u32) -> Option<&Remote>;
}

/// The windows of one communicator that the data path looks at first, and may not find all.
struct Cached(*const cache::Place);

impl Find for Cached {
    #[inline(always)]
    unsafe fn local(&self, handle: *mut c_void) -> Option<Local> {
        // SAFETY: the set that this came from keeps the cache alive.
        let place = unsafe { cache::find(self.0, handle)? };
        Some(Local { base: place.base(), len: place.len(), lkey: place.lkey() })
    }

    #[inline(always)]
    unsafe fn remote(&self, handle: *mut c_void, rank: u32) -> Option<&Remote> {
        // SAFETY: as above; the rank exists and windows outlive calls with them (caller).
        Some(unsafe { cache::find(self.0, handle)?.remote(rank) })
    }
}

/// All live windows of the communicator with this number.
struct Live(u64);

impl Live {
    #[inline(always)]
    unsafe fn window(&self, handle: *mut c_void) -> Option<&Window> {
        // SAFETY: passed on.
        unsafe { handles::get::<Window>(handle) }.filter(|w| w.coll == self.0)
    }
}

impl Find for Live {
    #[inline(always)]
    unsafe fn local(&self, handle: *mut c_void) -> Option<Local> {
        // SAFETY: passed on.
        let w = unsafe { self.window(handle)? };
        Some(Local { base: w.base, len: w.len, lkey: w.lkey })
    }

    #[inline(always)]
    unsafe fn remote(&self, handle: *mut c_void, rank: u32) -> Option<&Remote> {
        // SAFETY: every window has an entry for each rank of its communicator.
        Some(unsafe { self.window(handle)?.remote.get_unchecked(rank as usize) })
    }
}

/// Everything about a put but its context and rank, which exist.
///
/// # Safety
/// As for [`Find`].
#[inline(always)]
unsafe fn checked_put(windows: &impl Find, a: &PutArgs) -> Option<Put> {
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
        let to = unsafe { windows.remote(s.place.window, a.rank)? };
        let remote = to.base.wrapping_add(s.place.offset);
        let value = match s.op {
            SIGNAL_OP_ADD => s.value,
            SIGNAL_OP_INC => 1,
            _ => return None,
        };
        if !inside(s.place.offset, 8, to.len) || remote & 7 != 0 {
            return None;
        }
        put.signal = Some(Signal { remote, rkey: to.rkey, value, strong: s.strong });
    }
    Some(put)
}

/// Everything about a get but its context and rank, which exist.
///
/// # Safety
/// As for [`Find`].
#[inline(always)]
unsafe fn checked_get(windows: &impl Find, a: &GetArgs) -> Option<Get> {
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

/// The most common case of all: a put with a signal between the same windows as the last one on this (context, peer).
/// Stores the request. `false`: no effect; [`learn`] makes the next one find its windows.
///
/// # Safety
/// As for [`put`]; a `request` that is not NULL is writable.
#[inline(always)]
pub unsafe fn put_again(ctx: *mut c_void, a: &LatePut) -> bool {
    if a.more() {
        return false;
    }
    let rank = a.rank.get();
    // SAFETY: passed on.
    let Some(set) = (unsafe { sets::find(ctx, a.context, rank) }) else { return false };
    if a.request.get().is_null() {
        return false;
    }
    // SAFETY: context and rank exist; the request is not NULL, hence writable.
    unsafe { set.context(a.context).put_again(rank, a) }
}

/// [`put_again`] where it failed for want of room that completions make.
///
/// # Safety
/// As for [`put_again`].
#[inline(always)]
pub unsafe fn put_with_room(ctx: *mut c_void, a: &LatePut) -> bool {
    let rank = a.rank.get();
    // SAFETY: passed on; context and rank exist in what is found.
    unsafe {
        sets::find(ctx, a.context, rank).is_some_and(|set| set.context(a.context).make_room(rank)) && put_again(ctx, a)
    }
}

/// Remembers the windows of a put with a signal for [`put_again`], if they are in order.
///
/// # Safety
/// As for [`put`].
#[cold]
#[inline(never)]
pub unsafe fn learn(ctx: *mut c_void, a: &PutArgs) {
    let Some(signal) = a.signal.as_ref().filter(|_| a.size != 0).map(|s| s.place.window) else { return };
    // SAFETY: passed on.
    let Some(set) = (unsafe { sets::find(ctx, a.context, a.rank) }) else { return };
    let windows = Cached(set.windows());
    // SAFETY: the set is alive and the rank exists.
    unsafe {
        let (Some(src), Some(dst), Some(sig)) =
            (windows.local(a.src.window), windows.remote(a.dst.window, a.rank), windows.remote(signal, a.rank))
        else {
            return;
        };
        let windows = Windows {
            src: Side { handle: a.src.window as u64, base: src.base, end: src.len, key: src.lkey },
            dst: Side { handle: a.dst.window as u64, base: dst.base, end: dst.len, key: dst.rkey },
            sig: Side { handle: signal as u64, base: sig.base, end: sig.signals(), key: sig.rkey },
        };
        set.context(a.context).remember(a.rank, &windows);
    }
}

/// The common case of a put: verbs, live windows, nothing in the way. `None` has no effect: the long way, [`put`], finds
/// out what is the matter.
///
/// # Safety
/// As for [`put`].
#[inline(always)]
pub unsafe fn fast_put(ctx: *mut c_void, a: &PutArgs) -> Option<*mut c_void> {
    // SAFETY: context and rank exist in what is found, and both live as long as the set.
    unsafe {
        let set = sets::find(ctx, a.context, a.rank)?;
        let put = checked_put(&Cached(set.windows()), a)?;
        set.context(a.context).put(a.rank, &put).map(|request| request as *mut c_void)
    }
}

/// Checks and starts a put.
///
/// # Safety
/// As for [`handles::get`], and the source stays readable until the request is done.
#[inline(always)]
pub unsafe fn put(set: &Contexts, a: &PutArgs) -> Result<*mut c_void> {
    if set.has(a.context, a.rank) {
        // SAFETY: passed on; the rank was checked.
        if let Some(put) = unsafe { checked_put(&Live(set.coll), a) } {
            // SAFETY: context and rank were checked.
            return unsafe { set.put(a.context as u32, a.rank, &put) };
        }
    }
    // SAFETY: passed on.
    Err(unsafe { explain::put(set, a) })
}

/// Checks and starts a get.
///
/// # Safety
/// As for [`handles::get`], and the destination stays writable until the request is done.
#[inline(always)]
pub unsafe fn get(set: &Contexts, a: &GetArgs) -> Result<*mut c_void> {
    if set.has(a.context, a.rank) {
        // SAFETY: passed on; the rank was checked.
        if let Some(get) = unsafe { checked_get(&Live(set.coll), a) } {
            // SAFETY: context and rank were checked.
            return unsafe { set.get(a.context as u32, a.rank, &get) };
        }
    }
    // SAFETY: passed on.
    Err(unsafe { explain::get(set, a) })
}

/// Checks and starts a flush; NULL when there is nothing to wait for.
///
/// # Safety
/// As for [`handles::get`].
pub unsafe fn flush(set: &Contexts, context: i32, mhandle: *mut c_void, rank: u32) -> Result<*mut c_void> {
    explain::check_target(set, context, rank)?;
    // SAFETY: passed on.
    unsafe { explain::check_window(set, "mhandle", mhandle)? };
    set.flush(context as u32, rank)
}

/// The rest of the common case of `test`: takes completions and looks again. `None` says nothing.
///
/// # Safety
/// As for [`test()`]; `entry` is the request's (`lanes::find`).
#[inline(always)]
pub unsafe fn test_again(entry: &lanes::Entry, seq: Seq) -> Option<bool> {
    // SAFETY: the set is not destroyed during a call with it.
    match unsafe { entry.context()?.test_again(|| entry.completed(), seq) } {
        Short::Done => Some(true),
        Short::Unfinished => Some(false),
        Short::Ask => None,
    }
}

/// Answers `test`.
///
/// # Safety
/// As for [`handles::get`].
#[inline(always)]
pub unsafe fn test(coll: &Coll, request: *mut c_void) -> Result<bool> {
    let ticket = match lanes::find(coll.handle(), request) {
        Some(found) => Ticket { seq: Seq(request as u64 as u32), ..Ticket::decode(found.ticket() as *mut c_void) },
        None => Ticket::decode(request),
    };
    // SAFETY: the set was made by this communicator; it is not destroyed during a call with it (handles module docs).
    if let Some(set) = unsafe { coll.set(ticket.set) } {
        if set.has(ticket.context as i32, ticket.peer) {
            // SAFETY: the context was checked.
            return unsafe { set.test(ticket) };
        }
        set.check_open()?;
    }
    Err(explain::request(request))
}
