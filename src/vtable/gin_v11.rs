//! GIN v11: operations name the communicator.

use super::calls;
use super::guard::{guard, null, object, shared};
use super::setup::Connector;
use super::{data, reg, setup, NAME};
use crate::comm::coll::Coll;
use crate::comm::contexts::{Contexts, EngineKind};
use crate::error::{Error, Result};
use crate::rma::args::{Place, PutArgs};
use crate::sys::handles;
use nccl_plugin_api::gin_v11::GinV11;
use nccl_plugin_api::*;
use std::ffi::{c_int, c_void};

/// Connects and makes the one context that v11 has: its operations need no createContext.
unsafe extern "C" fn connect(
    _ctx: *mut c_void,
    handles: *mut *mut c_void,
    nranks: c_int,
    rank: c_int,
    listen_comm: *mut c_void,
    coll_comm: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: passed on.
    guard("connect", || unsafe {
        connect_with(handles, nranks, rank, (1, 0), listen_comm, coll_comm, Connector::Calls)
    })
}

/// Connects and makes `n_connections` contexts, which v11 and v12 operations use through the communicator.
///
/// # Safety
/// As [`setup::join`]; `coll_comm` is NULL or writable.
pub(super) unsafe fn connect_with(
    handles: *mut *mut c_void,
    nranks: c_int,
    rank: c_int,
    (n_connections, queue_depth): (c_int, c_int),
    listen_comm: *mut c_void,
    coll_comm: *mut *mut c_void,
    connector: Connector,
) -> Result<()> {
    // SAFETY: passed on.
    let (coll, place) = unsafe { setup::join(handles, nranks, rank, listen_comm, coll_comm, connector)? };
    // NCCL's proxy asks for its connections here; a caller that leaves the number open gets one.
    // Also where device code gets queues of ours: whoever has the communicator may call the data operations. With
    // gdaki nobody may, since its windows have names for device code alone; all ranks agreed on that.
    if coll.engine_kind() != EngineKind::Gdaki {
        coll.create_contexts(EngineKind::Nccl, || setup::spec(n_connections.max(1), queue_depth, -1))?;
    }
    coll.set_connected_depth(queue_depth);
    let handle = place.fill(coll.clone());
    coll.set_handle(handle);
    // SAFETY: `join` refused a NULL `coll_comm`.
    unsafe { coll_comm.write(handle) };
    Ok(())
}

/// createContext of a proxy-type plugin: the contexts exist since connect; NCCL gets a handle to ask for errors with.
///
/// # Safety
/// `gin_ctx` and `dev_handle` are NULL or writable.
pub(super) unsafe fn create_context_of(
    coll_comm: *mut c_void,
    gin_ctx: *mut *mut c_void,
    dev_handle: *mut *mut DeviceHandle,
) -> Result<()> {
    if gin_ctx.is_null() {
        return Err(null("ginCtx"));
    }
    let coll = shared::<Coll>(coll_comm)?;
    let handle = handles::insert(coll.first_set_shared()?)?;
    coll.instance.adopt_contexts(handle);
    // SAFETY: not NULL, or not touched. There is no device handle: NCCL's own proxy serves the GPU.
    unsafe {
        gin_ctx.write(handle);
        if !dev_handle.is_null() {
            dev_handle.write(std::ptr::null_mut());
        }
    }
    Ok(())
}

/// destroyContext: ends the handle only, the contexts go with the communicator. Those of a set with queues of this
/// library's were made by createContext, and end here.
pub(super) unsafe extern "C" fn destroy_context(gin_ctx: *mut c_void) -> NcclResult {
    guard("destroyContext", || {
        let set =
            handles::remove::<Contexts>(gin_ctx).ok_or_else(|| super::guard::dead(handles::Kind::Contexts, gin_ctx))?;
        if set.device().is_some() {
            set.destroy();
        }
        Ok(())
    })
}

/// The contexts that an operation naming a communicator works on.
///
/// # Safety
/// As [`object`].
#[inline(always)]
pub(super) unsafe fn set_of<'a>(coll_comm: *mut c_void) -> Result<&'a Contexts> {
    // SAFETY: passed on.
    unsafe { object::<Coll>(coll_comm)?.first_set() }.ok_or_else(|| {
        Error::usage("this communicator has no connections, or is closed; connect through this table first")
    })
}

unsafe extern "C" fn create_context(
    coll_comm: *mut c_void,
    _n_signals: c_int,
    _n_counters: c_int,
    gin_ctx: *mut *mut c_void,
    dev_handle: *mut *mut DeviceHandle,
) -> NcclResult {
    // SAFETY: passed on.
    guard("createContext", || unsafe { create_context_of(coll_comm, gin_ctx, dev_handle) })
}

#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn iput(
    coll_comm: *mut c_void,
    src_off: u64,
    src_mhandle: *mut c_void,
    size: usize,
    dst_off: u64,
    dst_mhandle: *mut c_void,
    rank: u32,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL does not destroy the objects during a call; memory stays valid until the request is done.
    guard("iput", || unsafe {
        let args = PutArgs::new(0, Place::new(src_off, src_mhandle), size, Place::new(dst_off, dst_mhandle), rank);
        data::started(request, || calls::put(set_of(coll_comm)?, &args))
    })
}

#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn iput_signal(
    coll_comm: *mut c_void,
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
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: as in `iput`.
    guard("iputSignal", || unsafe {
        let args = PutArgs::new(0, Place::new(src_off, src_mhandle), size, Place::new(dst_off, dst_mhandle), rank)
            .with_signal(Place::new(signal_off, signal_mhandle), signal_value, signal_op, true);
        data::started(request, || calls::put(set_of(coll_comm)?, &args))
    })
}

/// The table.
#[no_mangle]
#[allow(non_upper_case_globals)]
pub static ncclGinPlugin_v11: GinV11 = GinV11 {
    name: NAME.as_ptr(),
    init: Some(setup::init),
    devices: Some(setup::devices),
    get_properties: Some(setup::get_properties_v11),
    listen: Some(setup::listen_any),
    connect: Some(connect),
    create_context: Some(create_context),
    reg_mr_sym: Some(reg::gin_reg),
    reg_mr_sym_dma_buf: Some(reg::gin_reg_dma_buf),
    dereg_mr_sym: Some(reg::dereg),
    destroy_context: Some(destroy_context),
    close_coll: Some(setup::close_coll),
    close_listen: Some(setup::close_listen),
    iput: Some(iput),
    iput_signal: Some(iput_signal),
    test: Some(data::test),
    gin_progress: Some(setup::coll_progress),
    query_last_error: Some(setup::query_last_error_any),
    finalize: Some(setup::finalize_any),
};
