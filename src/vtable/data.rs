//! The data operations that table versions share.

use super::calls;
use super::fast::late::LatePut;
use super::fast::{self, requests};
use super::guard::{guard, null, object};
use crate::comm::contexts::Contexts;
use crate::error::Result;
use crate::rma::args::PutArgs;
use crate::rma::seq::Seq;
use nccl_plugin_api::NcclResult;
use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;

/// `iput` and `iputSignal` of tables whose operations name a context set.
///
/// # Safety
/// As `PutFn`.
#[inline(always)]
pub(super) unsafe fn start_put(
    name: &'static str,
    ctx: *mut c_void,
    args: &PutArgs,
    request: *mut *mut c_void,
) -> NcclResult {
    if !request.is_null() {
        // SAFETY: passed on; `request` is writable.
        unsafe {
            if let Some(started) = fast::put::fast_put(ctx, args) {
                request.write(started);
                return NcclResult::SUCCESS;
            }
        }
    }
    // SAFETY: passed on.
    unsafe { start_put_long(name, ctx, args, request) }
}

/// `iputSignal` of tables whose operations name a context set.
///
/// # Safety
/// As `PutFn`.
#[inline(always)]
pub(super) unsafe fn start_put_signal(ctx: *mut c_void, put: LatePut) -> NcclResult {
    // SAFETY: passed on.
    unsafe {
        if fast::put::put_again(ctx, &put) {
            return NcclResult::SUCCESS;
        }
        // A copy: only what is passed on has to be in memory, and only from here on.
        start_put_signal_long(ctx, &{ put })
    }
}

/// `iputSignal` when [`fast::put::put_again`] did not take it.
///
/// # Safety
/// As `PutFn`.
#[cold]
#[inline(never)]
unsafe fn start_put_signal_long(ctx: *mut c_void, put: &LatePut) -> NcclResult {
    // SAFETY: passed on.
    unsafe {
        if fast::put::put_with_room(ctx, put) {
            return NcclResult::SUCCESS;
        }
        let args = put.args();
        let result = start_put("iputSignal", ctx, &args, put.request.get());
        if result == NcclResult::SUCCESS {
            fast::put::learn(ctx, &args);
        }
        result
    }
}

/// # Safety
/// As `PutFn`.
#[inline(never)]
unsafe fn start_put_long(
    name: &'static str,
    ctx: *mut c_void,
    args: &PutArgs,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL does not destroy the objects during a call; memory stays valid until the request is done.
    guard(name, || unsafe { started(request, || calls::put(object::<Contexts>(ctx)?, args)) })
}

/// Starts an operation and stores its request.
///
/// # Safety
/// `request` is NULL or writable.
#[inline(always)]
pub(super) unsafe fn started(request: *mut *mut c_void, start: impl FnOnce() -> Result<*mut c_void>) -> Result<()> {
    if request.is_null() {
        return Err(null("request"));
    }
    let started = start()?;
    // SAFETY: not NULL, hence writable (caller).
    unsafe { request.write(started) };
    Ok(())
}

/// `iflush` of every version that has it.
///
/// # Safety
/// As `FlushFn`.
pub unsafe extern "C" fn iflush(
    ctx: *mut c_void,
    context: c_int,
    mhandle: *mut c_void,
    rank: u32,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL does not destroy the objects during a call with them; `request` is NULL or writable.
    guard("iflush", || unsafe {
        if request.is_null() {
            return Err(null("request"));
        }
        request.write(calls::flush(object::<Contexts>(ctx)?, context, mhandle, rank)?);
        Ok(())
    })
}

/// # Safety
/// As `TestFn`.
pub unsafe extern "C" fn test(coll_comm: *mut c_void, request: *mut c_void, done: *mut c_int) -> NcclResult {
    let Some(entry) = requests::find(coll_comm, request).filter(|_| !done.is_null()) else {
        // SAFETY: passed on.
        return unsafe { test_long(coll_comm, request, done) };
    };
    // SAFETY: NCCL does not destroy the objects during a call with them; `done` is not NULL, hence writable.
    unsafe {
        if Seq(request as u64 as u32).is_done(Seq(entry.completed().load(Ordering::Acquire))) {
            done.write(1);
            return NcclResult::SUCCESS;
        }
        test_again(entry, request, done)
    }
}

/// The answer "not yet", apart so that the other one is given without a detour.
///
/// # Safety
/// `done` is writable.
#[inline(never)]
unsafe extern "C" fn unfinished(done: *mut c_int) -> NcclResult {
    // SAFETY: the caller's promise.
    unsafe { done.write(0) };
    NcclResult::SUCCESS
}

/// An operation that was not done a moment ago.
///
/// # Safety
/// As `TestFn`; `done` is writable, and the entry is that of the request.
#[inline(never)]
unsafe extern "C" fn test_again(entry: &requests::RequestEntry, request: *mut c_void, done: *mut c_int) -> NcclResult {
    // SAFETY: the caller's promise.
    unsafe {
        match fast::test::test_again(entry, Seq(request as u64 as u32)) {
            Some(true) => {
                done.write(1);
                NcclResult::SUCCESS
            }
            Some(false) => unfinished(done),
            None => test_long(entry.coll(), request, done),
        }
    }
}

/// # Safety
/// As `TestFn`.
#[inline(never)]
unsafe extern "C" fn test_long(coll_comm: *mut c_void, request: *mut c_void, done: *mut c_int) -> NcclResult {
    // SAFETY: NCCL does not destroy the objects during a call with them; `done` is NULL or writable.
    guard("test", || unsafe {
        if done.is_null() {
            return Err(null("done"));
        }
        let is_done = calls::test(coll_comm, request)?;
        done.write(is_done as c_int);
        Ok(())
    })
}

/// `iputSignal` of a table whose operations name a set of contexts; `$extra` are the arguments that its version has
/// between the signal's operation and the request, `$strong` and `$hints` what they say.
macro_rules! iput_signal {
    ($visibility:vis ($($extra:ident: $kind:ty),*) strong: $strong:expr, hints: $hints:expr) => {
        #[allow(clippy::too_many_arguments)]
        $visibility unsafe extern "C" fn iput_signal(
            ctx: *mut c_void,
            context: c_int,
            src_off: u64,
            src_mhandle: *mut c_void,
            size: usize,
            dst_off: u64,
            dst_mhandle: *mut c_void,
            rank: u32,
            signal_off: u64,
            signal_mhandle: *mut c_void,
            signal_value: u64,
            signal_op: u32,
            $($extra: $kind,)*
            request: *mut *mut c_void,
        ) -> NcclResult {
            let put = LatePut {
                context,
                src_off,
                src: src_mhandle,
                size,
                dst_off,
                dst: Late(&dst_mhandle),
                rank: Late(&rank),
                sig_off: Late(&signal_off),
                sig: Late(&signal_mhandle),
                value: Late(&signal_value),
                op: Late(&signal_op),
                strong: $strong,
                hints: $hints,
                request: Late(&request),
            };
            // SAFETY: NCCL does not destroy the objects during a call; memory stays valid until the request is done.
            unsafe { data::start_put_signal(ctx, put) }
        }
    };
}

pub(super) use iput_signal;
