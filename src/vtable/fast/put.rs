//! A put by the short ways: between the same windows as the last one ([`put_again`]), or between windows that are
//! where the data path looks first ([`fast_put`]). Both say nothing when they do not take an operation.

use super::late::LatePut;
use super::sets;
use super::windows::Cached;
use crate::fabric::verbs::{Side, Windows};
use crate::rma::args::PutArgs;
use crate::rma::check::{self, Find};
use std::ffi::c_void;

/// The most common case of all: a put with a signal between the same windows as the last one on this (context, peer).
/// Stores the request. `false`: no effect; [`learn`] makes the next one find its windows.
///
/// # Safety
/// As for [`super::super::calls::put`]; a `request` that is not NULL is writable.
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
/// As for [`super::super::calls::put`].
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

/// The common case of a put: verbs, live windows, nothing in the way. `None` has no effect: the long way, `calls::put`,
/// finds out what is the matter.
///
/// # Safety
/// As for [`super::super::calls::put`].
#[inline(always)]
pub unsafe fn fast_put(ctx: *mut c_void, a: &PutArgs) -> Option<*mut c_void> {
    // SAFETY: context and rank exist in what is found, and both live as long as the set.
    unsafe {
        let set = sets::find(ctx, a.context, a.rank)?;
        let put = check::put(&Cached(set.windows()), a)?;
        set.context(a.context).put(a.rank, &put).map(|request| request as *mut c_void)
    }
}
