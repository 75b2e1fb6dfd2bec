//! The tables' functions that move data, and say how far it is.

use crate::arguments::{comm, contexts, put_out, window, Outcome};
use crate::comm::{ContextSet, Signal};
use crate::defect::{self, Defect};
use crate::inbox;
use crate::objects::{answer, bad, find, issue, retire, Object, Refusal};
use core::ffi::{c_int, c_void};
use nccl_plugin_api::NcclResult;
use std::sync::atomic::Ordering;

/// Turns a bad handle into success where the defect says so.
fn lenient(result: Outcome) -> Outcome {
    match result {
        Err(Refusal(_, message)) if message.contains("handle") && defect::on(Defect::AcceptBadHandle) => Ok(()),
        other => other,
    }
}

fn finish(call: &str, ctx: *mut c_void, result: Outcome) -> NcclResult {
    inbox::called_in();
    let result = lenient(result);
    if result.is_err() && defect::on(Defect::RefusalBreaks) {
        if let Ok(set) = contexts(ctx) {
            set.comm.broken.store(true, Ordering::Relaxed);
        }
    }
    answer(call, result)
}

#[allow(clippy::too_many_arguments)]
fn put(
    ctx: *mut c_void,
    context: c_int,
    source: (*mut c_void, u64),
    target: (*mut c_void, u64),
    size: usize,
    rank: u32,
    signal: Option<(u64, *mut c_void, u64, u32)>,
    request: *mut *mut c_void,
) -> Outcome {
    let set = contexts(ctx)?;
    if request.is_null() {
        return Err(bad("request is NULL"));
    }
    let data = |at: *mut c_void| if size > 0 { window(&set, at).map(Some) } else { Ok(None) };
    let (from, to) = (data(source.0)?, data(target.0)?);
    let flags = signal.map(|s| window(&set, s.1)).transpose()?;
    let signal = signal.zip(flags.as_deref());
    let signal = signal.map(|((offset, _, value, op), window)| Signal { offset, window, value, op });
    let (from, to) = (from.as_deref().map(|w| (w, source.1)), to.as_deref().map(|w| (w, target.1)));
    put_out(request, issue(Object::Request(set.put(context, rank, from, to, size, signal)?)), "request")
}

fn get(
    ctx: *mut c_void,
    context: c_int,
    source: (*mut c_void, u64),
    target: (*mut c_void, u64),
    size: usize,
    rank: u32,
    request: *mut *mut c_void,
) -> Outcome {
    let set = contexts(ctx)?;
    if request.is_null() {
        return Err(bad("request is NULL"));
    }
    let (from, to) = (window(&set, source.0)?, window(&set, target.0)?);
    let started = set.get(context, rank, (&from, source.1), (&to, target.1), size)?;
    put_out(request, issue(Object::Request(started)), "request")
}

pub unsafe extern "C" fn iput(
    ctx: *mut c_void,
    context: c_int,
    src_off: u64,
    src: *mut c_void,
    size: usize,
    dst_off: u64,
    dst: *mut c_void,
    rank: u32,
    request: *mut *mut c_void,
) -> NcclResult {
    finish("iput", ctx, put(ctx, context, (src, src_off), (dst, dst_off), size, rank, None, request))
}

pub unsafe extern "C" fn iput_v15(
    ctx: *mut c_void,
    context: c_int,
    src_off: u64,
    src: *mut c_void,
    size: usize,
    dst_off: u64,
    dst: *mut c_void,
    rank: u32,
    _opt_flags: u32,
    request: *mut *mut c_void,
) -> NcclResult {
    finish("iput", ctx, put(ctx, context, (src, src_off), (dst, dst_off), size, rank, None, request))
}

pub unsafe extern "C" fn iput_signal_v13(
    ctx: *mut c_void,
    context: c_int,
    src_off: u64,
    src: *mut c_void,
    size: usize,
    dst_off: u64,
    dst: *mut c_void,
    rank: u32,
    signal_off: u64,
    signal: *mut c_void,
    value: u64,
    op: u32,
    request: *mut *mut c_void,
) -> NcclResult {
    let signal = Some((signal_off, signal, value, op));
    finish("iputSignal", ctx, put(ctx, context, (src, src_off), (dst, dst_off), size, rank, signal, request))
}

pub unsafe extern "C" fn iput_signal_v14(
    ctx: *mut c_void,
    context: c_int,
    src_off: u64,
    src: *mut c_void,
    size: usize,
    dst_off: u64,
    dst: *mut c_void,
    rank: u32,
    signal_off: u64,
    signal: *mut c_void,
    value: u64,
    op: u32,
    _strong: bool,
    request: *mut *mut c_void,
) -> NcclResult {
    // Everything is in order here, so a weak signal may as well be strong.
    let signal = Some((signal_off, signal, value, op));
    finish("iputSignal", ctx, put(ctx, context, (src, src_off), (dst, dst_off), size, rank, signal, request))
}

pub unsafe extern "C" fn iput_signal_v15(
    ctx: *mut c_void,
    context: c_int,
    src_off: u64,
    src: *mut c_void,
    size: usize,
    dst_off: u64,
    dst: *mut c_void,
    rank: u32,
    signal_off: u64,
    signal: *mut c_void,
    value: u64,
    op: u32,
    _strong: bool,
    _opt_flags: u32,
    request: *mut *mut c_void,
) -> NcclResult {
    let signal = Some((signal_off, signal, value, op));
    finish("iputSignal", ctx, put(ctx, context, (src, src_off), (dst, dst_off), size, rank, signal, request))
}

pub unsafe extern "C" fn iget(
    ctx: *mut c_void,
    context: c_int,
    remote_off: u64,
    remote: *mut c_void,
    size: usize,
    local_off: u64,
    local: *mut c_void,
    rank: u32,
    request: *mut *mut c_void,
) -> NcclResult {
    finish("iget", ctx, get(ctx, context, (remote, remote_off), (local, local_off), size, rank, request))
}

pub unsafe extern "C" fn iget_v15(
    ctx: *mut c_void,
    context: c_int,
    remote_off: u64,
    remote: *mut c_void,
    size: usize,
    local_off: u64,
    local: *mut c_void,
    rank: u32,
    _opt_flags: u32,
    request: *mut *mut c_void,
) -> NcclResult {
    finish("iget", ctx, get(ctx, context, (remote, remote_off), (local, local_off), size, rank, request))
}

pub unsafe extern "C" fn iflush(
    ctx: *mut c_void,
    context: c_int,
    mhandle: *mut c_void,
    rank: u32,
    request: *mut *mut c_void,
) -> NcclResult {
    let run = || {
        let set = contexts(ctx)?;
        window(&set, mhandle)?;
        set.flush(context, rank)?;
        put_out(request, std::ptr::null_mut(), "request")
    };
    finish("iflush", ctx, run())
}

pub unsafe extern "C" fn test(coll_comm: *mut c_void, request: *mut c_void, done: *mut c_int) -> NcclResult {
    inbox::called_in();
    let run = || {
        comm(coll_comm)?;
        let Some(Object::Request(state)) = find(request) else {
            return Err(bad(format!("request handle {request:p} is unknown")));
        };
        if state.failed.load(Ordering::Acquire) {
            retire(request);
            return Err(Refusal(NcclResult::REMOTE_ERROR, "the operation's peer is gone".into()));
        }
        let finished = state.done.load(Ordering::Acquire);
        put_out(done, c_int::from(finished), "done")?;
        if finished {
            retire(request);
        }
        Ok(())
    };
    answer("test", lenient(run()))
}

pub unsafe extern "C" fn progress(ctx: *mut c_void) -> NcclResult {
    inbox::called_in();
    answer("progress", contexts(ctx).map(|_| ()))
}

pub unsafe extern "C" fn query_last_error(ctx: *mut c_void, has_error: *mut bool) -> NcclResult {
    let bad = |set: &ContextSet| {
        let fault = set.queue.get().is_some_and(|queue| queue.failed.load(Ordering::Acquire));
        fault || set.comm.inbox.any_dead()
    };
    answer("queryLastError", contexts(ctx).and_then(|set| put_out(has_error, bad(&set), "hasError")))
}
