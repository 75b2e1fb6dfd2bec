//! The tables' functions that make and end things: plugins, listeners, communicators, contexts, windows.

use crate::arguments::{comm, listener, put_out, Outcome};
use crate::comm::{hang, Comm, ContextSet, Window};
use crate::defect::{self, Defect};
use crate::inbox::Inbox;
use crate::objects::{answer, bad, find, issue, plugins, retire, retire_all, set_logger, Object, Refusal};
use crate::queue::{self, Queue};
use crate::wire::Token;
use core::ffi::{c_int, c_void};
use nccl_plugin_api::gin_v13::ConfigV13;
use nccl_plugin_api::rma_v14::ConfigV14;
use nccl_plugin_api::rma_v16::RmaPropertiesV16;
use nccl_plugin_api::*;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

pub unsafe extern "C" fn init(ctx: *mut *mut c_void, _comm_id: u64, log: Option<DebugLogger>) -> NcclResult {
    set_logger(log);
    if defect::on(Defect::LeakDescriptor) {
        std::mem::forget(std::fs::File::open("/dev/null"));
    }
    if defect::on(Defect::LeakMapping) {
        // Large enough for malloc to map it.
        std::mem::forget(std::hint::black_box(vec![1_u8; 1 << 20]));
    }
    answer("init", if ctx.is_null() { Err(bad("ctx is NULL")) } else { put_out(ctx, issue(Object::Plugin), "ctx") })
}

pub unsafe extern "C" fn devices(ndev: *mut c_int) -> NcclResult {
    answer("devices", put_out(ndev, 1, "ndev"))
}

pub unsafe extern "C" fn get_properties(dev: c_int, props: *mut PropertiesV12) -> NcclResult {
    describe(dev, props, DEVICE_GIN_PROXY)
}

/// Of the table that may give device code a queue, which NCCL takes from other types than the proxy's only.
pub unsafe extern "C" fn get_properties_gin(dev: c_int, props: *mut PropertiesV12) -> NcclResult {
    describe(dev, props, if queue::wanted() { DEVICE_GIN_GDAKI } else { DEVICE_GIN_PROXY })
}

fn describe(dev: c_int, props: *mut PropertiesV12, net_device_type: c_int) -> NcclResult {
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
        net_device_type,
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

pub unsafe extern "C" fn get_rma_properties(_comm: *mut c_void, props: *mut RmaPropertiesV16) -> NcclResult {
    answer("getRmaProperties", put_out(props, RmaPropertiesV16 { flushes_all_puts_on_any_signal: false }, "props"))
}

pub unsafe extern "C" fn listen(
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

pub unsafe extern "C" fn connect(
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

fn create(
    coll_comm: *mut c_void,
    n_contexts: c_int,
    out: *mut *mut c_void,
    more: impl FnOnce(&Arc<ContextSet>) -> Outcome,
) -> Outcome {
    let comm = comm(coll_comm)?;
    if !(1..=1024).contains(&n_contexts) || out.is_null() {
        return Err(bad(format!("{n_contexts} contexts, context pointer {out:p}")));
    }
    let set = Arc::new(ContextSet::open(comm, n_contexts as usize)?);
    more(&set)?;
    put_out(out, issue(Object::Contexts(set)), "context")
}

pub unsafe extern "C" fn create_context_gin(
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
    let config = unsafe { config.as_ref() };
    let n = config.map_or(0, |c| c.n_contexts);
    let queue = |set: &Arc<ContextSet>| {
        let Some(config) = config.filter(|_| queue::wanted()) else { return Ok(()) };
        let queue = Queue::start(set, config)?;
        put_out(dev_handle, queue.handle(), "devHandle")?;
        let _ = set.queue.set(queue);
        Ok(())
    };
    answer("createContext", create(coll_comm, n, out, queue))
}

pub unsafe extern "C" fn create_context_rma(
    coll_comm: *mut c_void,
    config: *mut ConfigV14,
    out: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: the caller passes NULL or a config.
    let n = unsafe { config.as_ref() }.map_or(0, |c| c.n_contexts);
    answer("createContext", create(coll_comm, n, out, |_| Ok(())))
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

pub unsafe extern "C" fn reg_mr_gin(
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
    let result = register(coll_comm, data, size, kind, mhandle);
    if result.is_ok() && queue::wanted() && !gin_handle.is_null() {
        // SAFETY: the caller passes room for a pointer, and the handle was put out.
        unsafe { gin_handle.write(*mhandle) };
    }
    answer("regMrSym", result)
}

pub unsafe extern "C" fn reg_mr_rma(
    coll_comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    kind: c_int,
    _flags: u64,
    mhandle: *mut *mut c_void,
) -> NcclResult {
    answer("regMrSym", register(coll_comm, data, size, kind, mhandle))
}

pub unsafe extern "C" fn dereg(coll_comm: *mut c_void, mhandle: *mut c_void) -> NcclResult {
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

pub unsafe extern "C" fn destroy_context(handle: *mut c_void) -> NcclResult {
    close("destroyContext", handle, |o| matches!(o, Object::Contexts(_)))
}
pub unsafe extern "C" fn close_coll(handle: *mut c_void) -> NcclResult {
    close("closeColl", handle, |o| matches!(o, Object::Comm(_)))
}
pub unsafe extern "C" fn close_listen(handle: *mut c_void) -> NcclResult {
    close("closeListen", handle, |o| matches!(o, Object::Listener(_)))
}
pub unsafe extern "C" fn finalize(handle: *mut c_void) -> NcclResult {
    let result = close("finalize", handle, |o| matches!(o, Object::Plugin));
    if result == NcclResult::SUCCESS && plugins() == 0 {
        let rest = retire_all();
        rest.iter().filter(|o| matches!(o, Object::Contexts(_))).for_each(shut);
        rest.iter().filter(|o| !matches!(o, Object::Contexts(_))).for_each(shut);
    }
    result
}
