//! From the arguments of a table call to a checked operation.
//!
//! The fast path only answers "all good"; when it is not, a cold function goes through the same arguments again and
//! says which one is wrong, with its value and what would be right.

use super::contexts::Contexts;
use super::lanes;
use super::op::{Get, Put, Signal};
use super::seq::Seq;
use super::ticket::Ticket;
use crate::comm::coll::Coll;
use crate::error::{Error, Result};
use crate::fabric::verbs::{Named, Short, Side, Windows};
use crate::handles;
use crate::memory::cache;
use crate::memory::window::Window;
use nccl_plugin_api::{SIGNAL_OP_ADD, SIGNAL_OP_INC};
use std::ffi::c_void;
use std::sync::atomic::Ordering;

/// A range of a window, as calls name it.
#[derive(Clone, Copy)]
pub struct Place {
    /// Bytes from the window's start.
    pub offset: u64,
    /// The window's handle.
    pub window: *mut c_void,
}

/// The signal half of an iputSignal.
#[derive(Clone, Copy)]
pub struct SignalArgs {
    /// Where the signal is.
    pub place: Place,
    /// Its operand.
    pub value: u64,
    /// `SIGNAL_OP_*`.
    pub op: u32,
    /// Ordered behind every earlier put.
    pub strong: bool,
}

/// An iput or iputSignal.
#[derive(Clone, Copy)]
pub struct PutArgs {
    /// Context in the set.
    pub context: i32,
    /// Source.
    pub src: Place,
    /// Bytes.
    pub size: usize,
    /// Destination.
    pub dst: Place,
    /// Peer.
    pub rank: u32,
    /// What to add afterwards.
    pub signal: Option<SignalArgs>,
    /// More follows.
    pub more: bool,
}

/// An iget.
#[derive(Clone, Copy)]
pub struct GetArgs {
    /// Context in the set.
    pub context: i32,
    /// Source, at the peer.
    pub remote: Place,
    /// Bytes.
    pub size: usize,
    /// Destination, here.
    pub local: Place,
    /// Peer.
    pub rank: u32,
    /// More follows.
    pub more: bool,
}

#[inline(always)]
fn inside(offset: u64, size: u64, len: u64) -> bool {
    offset <= len && size <= len - offset
}

/// # Safety
/// As for [`handles::get`].
#[inline(always)]
unsafe fn window<'a>(set: &Contexts, handle: *mut c_void) -> Option<&'a Window> {
    // SAFETY: passed on.
    unsafe { handles::get::<Window>(handle) }.filter(|w| w.coll == set.coll)
}

/// # Safety
/// As for [`handles::get`].
#[inline(always)]
unsafe fn checked_put(set: &Contexts, a: &PutArgs) -> Option<Put> {
    if a.context as u32 >= set.count || a.rank >= set.nranks {
        return None;
    }
    let rank = a.rank as usize;
    let size = a.size as u64;
    let mut put = Put { local: 0, lkey: 0, rkey: 0, remote: 0, len: size, signal: None, more: a.more };
    if let Some(s) = &a.signal {
        // SAFETY: passed on.
        let w = unsafe { window(set, s.place.window)? };
        // SAFETY: every window has nranks remotes, and the rank was checked.
        let r = unsafe { w.remote.get_unchecked(rank) };
        let remote = r.base.wrapping_add(s.place.offset);
        let value = match s.op {
            SIGNAL_OP_ADD => s.value,
            SIGNAL_OP_INC => 1,
            _ => return None,
        };
        if !inside(s.place.offset, 8, r.len) || remote & 7 != 0 {
            return None;
        }
        put.signal = Some(Signal { remote, rkey: r.rkey, value, strong: s.strong });
        if size == 0 {
            return Some(put);
        }
    }
    // SAFETY: passed on.
    let (src, dst) = unsafe { (window(set, a.src.window)?, window(set, a.dst.window)?) };
    // SAFETY: as above.
    let r = unsafe { dst.remote.get_unchecked(rank) };
    if !inside(a.src.offset, size, src.len) || !inside(a.dst.offset, size, r.len) {
        return None;
    }
    put.local = src.base + a.src.offset;
    put.lkey = src.lkey;
    put.remote = r.base + a.dst.offset;
    put.rkey = r.rkey;
    Some(put)
}

/// The common case of a put in as few instructions as it takes: verbs, live windows, everything in order. `None` has no
/// effect and says nothing: the long way, [`put`], finds out what is the matter.
///
/// # Safety
/// As for [`put`].
#[inline(always)]
pub unsafe fn fast_put(ctx: *mut c_void, a: &PutArgs) -> Option<*mut c_void> {
    // SAFETY: passed on.
    let fast = unsafe { &handles::get::<Contexts>(ctx)?.fast };
    if a.context as u32 >= fast.count.load(Ordering::Acquire) || a.rank >= fast.nranks {
        return None;
    }
    let size = a.size as u64;
    let mut put = Put { local: 0, lkey: 0, rkey: 0, remote: 0, len: size, signal: None, more: a.more };
    if size != 0 || a.signal.is_none() {
        // SAFETY: the set keeps its window cache alive; windows outlive calls with them (handles module docs).
        let (src, dst) =
            unsafe { (cache::find(fast.windows, a.src.window)?, cache::find(fast.windows, a.dst.window)?) };
        // SAFETY: the rank was checked.
        let to = unsafe { dst.remote(a.rank) };
        if a.src.offset.checked_add(size)? > src.len() || a.dst.offset.checked_add(size)? > to.len {
            return None;
        }
        put.local = src.base().wrapping_add(a.src.offset);
        put.lkey = src.lkey();
        put.remote = to.base.wrapping_add(a.dst.offset);
        put.rkey = to.rkey;
    }
    if let Some(s) = &a.signal {
        // SAFETY: as above.
        let to = unsafe { cache::find(fast.windows, s.place.window)?.remote(a.rank) };
        if s.place.offset >= u64::from(to.signals) || s.place.offset & 7 != 0 || s.op.wrapping_sub(1) > 1 {
            return None;
        }
        let value = if s.op == SIGNAL_OP_INC { 1 } else { s.value };
        let remote = to.base.wrapping_add(s.place.offset);
        put.signal = Some(Signal { remote, rkey: to.rkey, value, strong: s.strong });
    }
    // SAFETY: the context was checked, and lives as long as its set.
    let seq = unsafe { (*fast.contexts.add(a.context as usize)).put(a.rank, &put)? };
    let ticket = fast.ticket | (a.context as u64) << 48 | u64::from(a.rank) << 32 | u64::from(seq.0);
    Some(ticket as *mut c_void)
}

/// The most common case of all: a put with a signal between the same windows as the last one on this (context, peer).
/// `false`: no effect, and it says nothing; [`learn`] makes the next one find them.
///
/// # Safety
/// As for [`put`].
#[inline(always)]
pub unsafe fn put_again(
    ctx: *mut c_void,
    context: i32,
    rank: u32,
    op: u32,
    mut named: Named,
    request: *mut *mut c_void,
) -> bool {
    // SAFETY: passed on.
    let Some(set) = (unsafe { handles::get::<Contexts>(ctx) }) else { return false };
    let fast = &set.fast;
    if context as u32 >= fast.count.load(Ordering::Acquire) || rank >= fast.nranks || request.is_null() {
        return false;
    }
    if op != SIGNAL_OP_ADD {
        cold();
        if op != SIGNAL_OP_INC {
            return false;
        }
        named.value = 1;
    }
    // SAFETY: context and rank were checked; the request is not NULL, hence writable.
    unsafe {
        let Some(ticket) = (*fast.contexts.add(context as u32 as usize)).put_again(rank, &named) else { return false };
        request.write(ticket as *mut c_void);
    }
    true
}

/// Tells the compiler which branch to lay out of the way.
#[cold]
fn cold() {}

/// Remembers the windows of a put with a signal for [`put_again`], if they are in order.
///
/// # Safety
/// As for [`put`].
#[cold]
#[inline(never)]
pub unsafe fn learn(ctx: *mut c_void, a: &PutArgs) {
    let _ = (|| {
        // SAFETY: passed on.
        let fast = unsafe { &handles::get::<Contexts>(ctx)?.fast };
        if a.context as u32 >= fast.count.load(Ordering::Acquire) || a.rank >= fast.nranks || a.size == 0 {
            return None;
        }
        let signal = a.signal.as_ref()?.place.window;
        // SAFETY: the set keeps its window cache alive; the rank was checked.
        unsafe {
            let src = cache::find(fast.windows, a.src.window)?;
            let (dst, sig) = (cache::find(fast.windows, a.dst.window)?, cache::find(fast.windows, signal)?);
            let (dst, sig) = (dst.remote(a.rank), sig.remote(a.rank));
            let windows = Windows {
                src: Side { handle: a.src.window as u64, base: src.base(), end: src.len(), key: src.lkey() },
                dst: Side { handle: a.dst.window as u64, base: dst.base, end: dst.len, key: dst.rkey },
                sig: Side { handle: signal as u64, base: sig.base, end: sig.signals.into(), key: sig.rkey },
            };
            (*fast.contexts.add(a.context as usize)).remember(a.rank, &windows);
        }
        Some(())
    })();
}

/// The rest of the common case of `test`: takes completions and looks again. `None` says nothing.
///
/// # Safety
/// As for [`test()`]; `entry` is the request's (`lanes::find`).
#[inline(always)]
pub unsafe fn test_again(entry: &lanes::Entry, seq: Seq) -> Option<bool> {
    // SAFETY: the set is not destroyed during a call with it.
    match unsafe { entry.context().test_again(entry.completed(), seq) } {
        Short::Done => Some(true),
        Short::Unfinished => Some(false),
        Short::Ask => None,
    }
}

/// Checks and starts a put.
///
/// # Safety
/// As for [`handles::get`], and the source stays readable until the request is done.
#[inline(always)]
pub unsafe fn put(set: &Contexts, a: &PutArgs) -> Result<Ticket> {
    // SAFETY: passed on.
    match unsafe { checked_put(set, a) } {
        // SAFETY: context and rank were checked.
        Some(put) => unsafe { set.put(a.context as u32, a.rank, &put) },
        // SAFETY: passed on.
        None => Err(unsafe { explain_put(set, a) }),
    }
}

/// Checks and starts a get.
///
/// # Safety
/// As for [`handles::get`], and the destination stays writable until the request is done.
#[inline(always)]
pub unsafe fn get(set: &Contexts, a: &GetArgs) -> Result<Ticket> {
    // SAFETY: passed on.
    match unsafe { checked_get(set, a) } {
        // SAFETY: context and rank were checked.
        Some(get) => unsafe { set.get(a.context as u32, a.rank, &get) },
        // SAFETY: passed on.
        None => Err(unsafe { explain_get(set, a) }),
    }
}

/// # Safety
/// As for [`handles::get`].
#[inline(always)]
unsafe fn checked_get(set: &Contexts, a: &GetArgs) -> Option<Get> {
    if a.context as u32 >= set.count || a.rank >= set.nranks {
        return None;
    }
    // SAFETY: passed on.
    let (remote, local) = unsafe { (window(set, a.remote.window)?, window(set, a.local.window)?) };
    let size = a.size as u64;
    // SAFETY: every window has nranks remotes, and the rank was checked.
    let r = unsafe { remote.remote.get_unchecked(a.rank as usize) };
    if !inside(a.remote.offset, size, r.len) || !inside(a.local.offset, size, local.len) {
        return None;
    }
    Some(Get {
        local: local.base + a.local.offset,
        lkey: local.lkey,
        rkey: r.rkey,
        remote: r.base + a.remote.offset,
        len: size,
        more: a.more,
    })
}

/// Checks and starts a flush.
///
/// # Safety
/// As for [`handles::get`].
pub unsafe fn flush(set: &Contexts, context: i32, mhandle: *mut c_void, rank: u32) -> Result<Option<Ticket>> {
    check_target(set, context, rank)?;
    // SAFETY: passed on.
    unsafe { check_window(set, "mhandle", mhandle)? };
    set.flush(context as u32, rank)
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
        if ticket.context < set.count && ticket.peer < set.nranks {
            // SAFETY: the context was checked.
            return unsafe { set.test(ticket) };
        }
    }
    Err(explain_request(request))
}

#[cold]
fn explain_request(request: *mut c_void) -> Error {
    Error::argument(format!(
        "request = {request:p} is not one that this communicator returned, or its context is destroyed; pass what \
         iput, iputSignal, iget or iflush stored, as long as its context lives"
    ))
}

fn check_target(set: &Contexts, context: i32, rank: u32) -> Result<()> {
    if context as u32 >= set.count {
        return Err(Error::argument(format!(
            "context = {context}, but this set has contexts 0 to {}",
            set.count.saturating_sub(1)
        )));
    }
    if rank >= set.nranks {
        return Err(Error::argument(format!("rank = {rank}, but the communicator has ranks 0 to {}", set.nranks - 1)));
    }
    Ok(())
}

/// # Safety
/// As for [`handles::get`].
unsafe fn check_window<'a>(set: &Contexts, name: &str, handle: *mut c_void) -> Result<&'a Window> {
    if handle.is_null() {
        return Err(Error::argument(format!("{name} is NULL; register the memory with regMrSym and pass its mhandle")));
    }
    // SAFETY: passed on.
    let w = unsafe { handles::get::<Window>(handle) }.ok_or_else(|| {
        Error::argument(format!(
            "{name} = {handle:p} is no memory handle, or was deregistered; pass a live mhandle from regMrSym"
        ))
    })?;
    if w.coll != set.coll {
        return Err(Error::argument(format!(
            "{name} = {handle:p} was registered with another communicator; register the memory with this one"
        )));
    }
    Ok(w)
}

fn check_range(what: &str, offset: u64, size: u64, len: u64, of: &str) -> Result<()> {
    if inside(offset, size, len) {
        return Ok(());
    }
    let end = offset.checked_add(size).map_or("more than 2^64".to_string(), |e| e.to_string());
    Err(Error::argument(format!(
        "{what} = {offset} with size {size} ends at byte {end}, past {of}, which has {len} bytes; stay inside the \
         registered window"
    )))
}

/// # Safety
/// As for [`handles::get`].
#[cold]
#[inline(never)]
unsafe fn explain_put(set: &Contexts, a: &PutArgs) -> Error {
    let find = || -> Result<()> {
        check_target(set, a.context, a.rank)?;
        let rank = a.rank as usize;
        if let Some(s) = &a.signal {
            if s.op != SIGNAL_OP_INC && s.op != SIGNAL_OP_ADD {
                return Err(Error::argument(format!("signalOp = {}, but only 1 (increment) and 2 (add) exist", s.op)));
            }
            // SAFETY: passed on.
            let w = unsafe { check_window(set, "signalMhandle", s.place.window)? };
            let r = &w.remote[rank];
            check_range("signalOff", s.place.offset, 8, r.len, &format!("the signal window of rank {}", a.rank))?;
            if r.base.wrapping_add(s.place.offset) & 7 != 0 {
                return Err(Error::argument(format!(
                    "signalOff = {} makes the signal's address no multiple of 8; signals are 8-byte aligned words",
                    s.place.offset
                )));
            }
            if a.size == 0 {
                return Ok(());
            }
        }
        // SAFETY: passed on.
        let (src, dst) =
            unsafe { (check_window(set, "srcMhandle", a.src.window)?, check_window(set, "dstMhandle", a.dst.window)?) };
        check_range("srcOff", a.src.offset, a.size as u64, src.len, "the source window")?;
        let r = &dst.remote[rank];
        check_range("dstOff", a.dst.offset, a.size as u64, r.len, &format!("the window of rank {}", a.rank))
    };
    find().err().unwrap_or_else(|| Error::internal("a put was refused, but all its arguments look right"))
}

/// # Safety
/// As for [`handles::get`].
#[cold]
#[inline(never)]
unsafe fn explain_get(set: &Contexts, a: &GetArgs) -> Error {
    let find = || -> Result<()> {
        check_target(set, a.context, a.rank)?;
        // SAFETY: passed on.
        let (remote, local) = unsafe {
            (check_window(set, "remoteMhandle", a.remote.window)?, check_window(set, "localMhandle", a.local.window)?)
        };
        let r = &remote.remote[a.rank as usize];
        check_range("remoteOff", a.remote.offset, a.size as u64, r.len, &format!("the window of rank {}", a.rank))?;
        check_range("localOff", a.local.offset, a.size as u64, local.len, "the local window")
    };
    find().err().unwrap_or_else(|| Error::internal("a get was refused, but all its arguments look right"))
}
