//! The exported tables.

use crate::comm::{hang, Comm, ContextSet, Signal, Window};
use crate::defect::{self, Defect};
use crate::inbox::{self, Inbox};
use crate::objects::{answer, bad, find, issue, plugins, retire, retire_all, set_logger, Object, Refusal};
use crate::wire::Token;
use core::ffi::{c_int, c_void};
use nccl_plugin_api::gin_v13::{ConfigV13, GinV13};
use nccl_plugin_api::rma_v14::{ConfigV14, RmaV14};
use nccl_plugin_api::rma_v16::{RmaPropertiesV16, RmaV16};
use nccl_plugin_api::*;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

type Outcome = Result<(), Refusal>;

fn put_out<T>(out: *mut T, value: T, name: &str) -> Outcome {
    if out.is_null() {
        return Err(bad(format!("{name} is NULL")));
    }
    // SAFETY: the caller passes NULL or room for one value.
    unsafe { out.write(value) };
    Ok(())
}

macro_rules! finder {
    ($name:ident, $variant:ident, $type:ty) => {
        fn $name(handle: *mut c_void) -> Result<Arc<$type>, Refusal> {
            match find(handle) {
                Some(Object::$variant(object)) => Ok(object),
                _ => Err(bad(format!(concat!(stringify!($variant), " handle {:p} is unknown"), handle))),
            }
        }
    };
}
finder!(comm, Comm, Comm);
finder!(contexts, Contexts, ContextSet);
finder!(listener, Listener, Inbox);

fn window(set: &ContextSet, handle: *mut c_void) -> Result<Arc<Window>, Refusal> {
    match find(handle) {
        Some(Object::Window(window)) if Arc::ptr_eq(&window.comm, &set.comm) => Ok(window),
        _ => Err(bad(format!("window handle {handle:p} is unknown"))),
    }
}

unsafe extern "C" fn init(ctx: *mut *mut c_void, _comm_id: u64, log: Option<DebugLogger>) -> NcclResult {
    set_logger(log);
    if defect::on(Defect::LeakDescriptor) {
        std::mem::forget(std::fs::File::open("/dev/null"));
    }
    if defect::on(Defect::LeakMapping) {
        // Large enough for malloc to map it.
        std::mem::forget(vec![1_u8; 1 << 20]);
    }
    answer("init", if ctx.is_null() { Err(bad("ctx is NULL")) } else { put_out(ctx, issue(Object::Plugin), "ctx") })
}

unsafe extern "C" fn devices(ndev: *mut c_int) -> NcclResult {
    answer("devices", put_out(ndev, 1, "ndev"))
}

unsafe extern "C" fn get_properties(dev: c_int, props: *mut PropertiesV12) -> NcclResult {
    let properties = PropertiesV12 {
        name: c"reference".as_ptr().cast_mut(),
        pci_path: std::ptr::null_mut(),
        guid: 0,
        ptr_support: PTR_HOST,
        reg_is_global: 0,
        force_flush: 0,
        speed: 1000,
        port: 1,
        latency: 100.0,
        max_comms: 64,
        max_recvs: 1,
        net_device_type: DEVICE_GIN_PROXY,
        net_device_version: 0,
        v_props: VDeviceProps8 { ndevs: 1, devs: [0; 8] },
        max_p2p_bytes: 1 << 40,
        max_coll_bytes: 1 << 40,
        max_multi_request_size: 1,
        rail_id: -1,
        plane_id: -1,
    };
    let known = if dev == 0 { Ok(()) } else { Err(bad(format!("device {dev} of 1"))) };
    answer("getProperties", known.and_then(|()| put_out(props, properties, "props")))
}

unsafe extern "C" fn get_rma_properties(_comm: *mut c_void, props: *mut RmaPropertiesV16) -> NcclResult {
    answer("getRmaProperties", put_out(props, RmaPropertiesV16 { flushes_all_puts_on_any_signal: false }, "props"))
}

unsafe extern "C" fn listen(
    _ctx: *mut c_void,
    dev: c_int,
    handle: *mut c_void,
    listen_comm: *mut *mut c_void,
) -> NcclResult {
    let run = || {
        if dev != 0 || handle.is_null() || listen_comm.is_null() {
            return Err(bad(format!("device {dev}, handle {handle:p}, listenComm {listen_comm:p}")));
        }
        let inbox = Inbox::open().map_err(|e| Refusal(NcclResult::SYSTEM_ERROR, e.to_string()))?;
        let (port, token) = inbox.coordinates();
        let mut bytes = [0; HANDLE_BYTES];
        bytes[..2].copy_from_slice(&port.to_le_bytes());
        bytes[2..18].copy_from_slice(&token);
        // SAFETY: the caller's handle has room for HANDLE_BYTES.
        unsafe { handle.cast::<[u8; HANDLE_BYTES]>().write_unaligned(bytes) };
        put_out(listen_comm, issue(Object::Listener(inbox)), "listenComm")
    };
    answer("listen", run())
}

unsafe extern "C" fn connect(
    _ctx: *mut c_void,
    handles: *mut *mut c_void,
    nranks: c_int,
    rank: c_int,
    listen_comm: *mut c_void,
    coll_comm: *mut *mut c_void,
) -> NcclResult {
    let run = || {
        let inbox = listener(listen_comm)?;
        if nranks < 1 || rank < 0 || rank >= nranks || handles.is_null() || coll_comm.is_null() {
            return Err(bad(format!("rank {rank} of {nranks}, handles {handles:p}, collComm {coll_comm:p}")));
        }
        let mut peers = Vec::new();
        for peer in 0..nranks as usize {
            // SAFETY: the caller passes nranks pointers to HANDLE_BYTES each.
            let bytes = unsafe { handles.add(peer).read().cast::<[u8; HANDLE_BYTES]>().read_unaligned() };
            let token: Token = bytes[2..18].try_into().expect("sixteen bytes");
            peers.push((u16::from_le_bytes([bytes[0], bytes[1]]), token));
        }
        inbox.adopt();
        let comm =
            Comm { rank: rank as u32, peers, inbox, broken: AtomicBool::new(false), hangs: AtomicBool::new(false) };
        put_out(coll_comm, issue(Object::Comm(Arc::new(comm))), "collComm")
    };
    answer("connect", run())
}

fn create(coll_comm: *mut c_void, n_contexts: c_int, out: *mut *mut c_void) -> Outcome {
    let comm = comm(coll_comm)?;
    if !(1..=1024).contains(&n_contexts) || out.is_null() {
        return Err(bad(format!("{n_contexts} contexts, context pointer {out:p}")));
    }
    let set = ContextSet::open(comm, n_contexts as usize)?;
    put_out(out, issue(Object::Contexts(Arc::new(set))), "context")
}

unsafe extern "C" fn create_context_gin(
    coll_comm: *mut c_void,
    config: *mut ConfigV13,
    out: *mut *mut c_void,
    dev_handle: *mut *mut DeviceHandle,
) -> NcclResult {
    if !dev_handle.is_null() {
        // SAFETY: the caller passes NULL or room for a pointer.
        unsafe { dev_handle.write(std::ptr::null_mut()) };
    }
    // SAFETY: the caller passes NULL or a config.
    let n = unsafe { config.as_ref() }.map_or(0, |c| c.n_contexts);
    answer("createContext", create(coll_comm, n, out))
}

unsafe extern "C" fn create_context_rma(
    coll_comm: *mut c_void,
    config: *mut ConfigV14,
    out: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: the caller passes NULL or a config.
    let n = unsafe { config.as_ref() }.map_or(0, |c| c.n_contexts);
    answer("createContext", create(coll_comm, n, out))
}

fn register(coll_comm: *mut c_void, data: *mut c_void, size: usize, kind: c_int, out: *mut *mut c_void) -> Outcome {
    let comm = comm(coll_comm)?;
    if comm.hangs.load(Ordering::Relaxed) {
        hang();
    }
    if data.is_null() || size == 0 || kind != PTR_HOST || out.is_null() {
        if !defect::on(Defect::UncountedRefusal) {
            comm.inbox.skip();
        }
        comm.hangs.store(defect::on(Defect::RefusalHangs), Ordering::Relaxed);
        return Err(bad(format!("data {data:p}, size {size}, type {kind}, mhandle {out:p}")));
    }
    let number = comm.inbox.register(data as usize, size);
    put_out(out, issue(Object::Window(Arc::new(Window { number, comm, base: data as usize, len: size }))), "mhandle")
}

unsafe extern "C" fn reg_mr_gin(
    coll_comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    _flags: u64,
    mhandle: *mut *mut c_void,
    gin_handle: *mut *mut c_void,
) -> NcclResult {
    if !gin_handle.is_null() {
        // SAFETY: the caller passes NULL or room for a pointer.
        unsafe { gin_handle.write(std::ptr::null_mut()) };
    }
    answer("regMrSym", register(coll_comm, data, size, kind, mhandle))
}

unsafe extern "C" fn reg_mr_rma(
    coll_comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    _flags: u64,
    mhandle: *mut *mut c_void,
) -> NcclResult {
    answer("regMrSym", register(coll_comm, data, size, kind, mhandle))
}

unsafe extern "C" fn dereg(coll_comm: *mut c_void, mhandle: *mut c_void) -> NcclResult {
    let run = || {
        let comm = comm(coll_comm)?;
        match find(mhandle) {
            Some(Object::Window(window)) if Arc::ptr_eq(&window.comm, &comm) => {
                retire(mhandle);
                comm.inbox.deregister(window.number);
                Ok(())
            }
            _ if defect::on(Defect::AcceptDoubleDereg) => Ok(()),
            _ => Err(bad(format!("window handle {mhandle:p} is unknown"))),
        }
    };
    answer("deregMrSym", run())
}

fn close(call: &str, handle: *mut c_void, fits: impl Fn(&Object) -> bool) -> NcclResult {
    let run = || match find(handle) {
        Some(object) if fits(&object) => {
            retire(handle);
            shut(&object);
            Ok(())
        }
        _ if defect::on(Defect::CrashOnSecondClose) => std::process::abort(),
        _ => Err(bad(format!("handle {handle:p} is unknown or closed already"))),
    };
    answer(call, run())
}

fn shut(object: &Object) {
    match object {
        // A listener that a communicator took over lives on in it.
        Object::Listener(inbox) if !inbox.is_adopted() => inbox.close(),
        Object::Comm(comm) => comm.inbox.close(),
        Object::Contexts(set) => set.close(),
        _ => {}
    }
}

unsafe extern "C" fn destroy_context(handle: *mut c_void) -> NcclResult {
    close("destroyContext", handle, |o| matches!(o, Object::Contexts(_)))
}
unsafe extern "C" fn close_coll(handle: *mut c_void) -> NcclResult {
    close("closeColl", handle, |o| matches!(o, Object::Comm(_)))
}
unsafe extern "C" fn close_listen(handle: *mut c_void) -> NcclResult {
    close("closeListen", handle, |o| matches!(o, Object::Listener(_)))
}
unsafe extern "C" fn finalize(handle: *mut c_void) -> NcclResult {
    let result = close("finalize", handle, |o| matches!(o, Object::Plugin));
    if result == NcclResult::SUCCESS && plugins() == 0 {
        let rest = retire_all();
        rest.iter().filter(|o| matches!(o, Object::Contexts(_))).for_each(shut);
        rest.iter().filter(|o| !matches!(o, Object::Contexts(_))).for_each(shut);
    }
    result
}

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

unsafe extern "C" fn iput(
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

unsafe extern "C" fn iput_v15(
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

unsafe extern "C" fn iput_signal_v13(
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

unsafe extern "C" fn iput_signal_v14(
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

unsafe extern "C" fn iput_signal_v15(
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

unsafe extern "C" fn iget(
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

unsafe extern "C" fn iget_v15(
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

unsafe extern "C" fn iflush(
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

unsafe extern "C" fn test(coll_comm: *mut c_void, request: *mut c_void, done: *mut c_int) -> NcclResult {
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

unsafe extern "C" fn progress(ctx: *mut c_void) -> NcclResult {
    inbox::called_in();
    answer("progress", contexts(ctx).map(|_| ()))
}

unsafe extern "C" fn query_last_error(ctx: *mut c_void, has_error: *mut bool) -> NcclResult {
    answer("queryLastError", contexts(ctx).and_then(|set| put_out(has_error, set.comm.inbox.any_dead(), "hasError")))
}

/// GIN v13.
#[no_mangle]
pub static ncclGinPlugin_v13: GinV13 = GinV13 {
    name: c"reference".as_ptr(),
    init: Some(init),
    devices: Some(devices),
    get_properties: Some(get_properties),
    listen: Some(listen),
    connect: Some(connect),
    create_context: Some(create_context_gin),
    reg_mr_sym: Some(reg_mr_gin),
    reg_mr_sym_dma_buf: None,
    dereg_mr_sym: Some(dereg),
    destroy_context: Some(destroy_context),
    close_coll: Some(close_coll),
    close_listen: Some(close_listen),
    iput: Some(iput),
    iput_signal: Some(iput_signal_v13),
    iget: Some(iget),
    iflush: Some(iflush),
    test: Some(test),
    gin_progress: Some(progress),
    query_last_error: Some(query_last_error),
    finalize: Some(finalize),
};

/// RMA v14.
#[no_mangle]
pub static ncclRmaPlugin_v14: RmaV14 = RmaV14 {
    name: c"reference".as_ptr(),
    init: Some(init),
    devices: Some(devices),
    get_properties: Some(get_properties),
    listen: Some(listen),
    connect: Some(connect),
    create_context: Some(create_context_rma),
    reg_mr_sym: Some(reg_mr_rma),
    reg_mr_sym_dma_buf: None,
    dereg_mr_sym: Some(dereg),
    destroy_context: Some(destroy_context),
    close_coll: Some(close_coll),
    close_listen: Some(close_listen),
    iput: Some(iput),
    iput_signal: Some(iput_signal_v14),
    iget: Some(iget),
    iflush: Some(iflush),
    test: Some(test),
    rma_progress: Some(progress),
    query_last_error: Some(query_last_error),
    finalize: Some(finalize),
};

/// RMA v16.
#[no_mangle]
pub static ncclRmaPlugin_v16: RmaV16 = RmaV16 {
    name: c"reference".as_ptr(),
    init: Some(init),
    devices: Some(devices),
    get_rma_properties: Some(get_rma_properties),
    get_properties: Some(get_properties),
    listen: Some(listen),
    connect: Some(connect),
    create_context: Some(create_context_rma),
    reg_mr_sym: Some(reg_mr_rma),
    reg_mr_sym_dma_buf: None,
    dereg_mr_sym: Some(dereg),
    destroy_context: Some(destroy_context),
    close_coll: Some(close_coll),
    close_listen: Some(close_listen),
    iput: Some(iput_v15),
    iput_signal: Some(iput_signal_v15),
    iget: Some(iget_v15),
    iflush: Some(iflush),
    test: Some(test),
    rma_progress: Some(progress),
    query_last_error: Some(query_last_error),
    finalize: Some(finalize),
};
