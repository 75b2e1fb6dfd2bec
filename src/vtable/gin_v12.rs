//! GIN v12: operations name the communicator and one of its connections.

use super::calls;
use super::gin_v11::{connect_with, create_context_of, destroy_context, set_of};
use super::guard::{guard, shared};
use super::own::{self, Asked};
use super::setup::Connector;
use super::{data, reg, setup, NAME};
use crate::comm::coll::Coll;
use crate::comm::contexts::EngineKind;
use crate::proxy::descriptor::layout::Table;
use crate::rma::args::{Place, PutArgs};
use nccl_plugin_api::gin_v12::GinV12;
use nccl_plugin_api::*;
use std::ffi::{c_int, c_void};

#[allow(clippy::too_many_arguments)]
unsafe extern "C" fn connect(
    _ctx: *mut c_void,
    handles: *mut *mut c_void,
    nranks: c_int,
    rank: c_int,
    n_connections: c_int,
    queue_depth: c_int,
    listen_comm: *mut c_void,
    coll_comm: *mut *mut c_void,
) -> NcclResult {
    guard("connect", || {
        // SAFETY: passed on.
        unsafe {
            connect_with(handles, nranks, rank, (n_connections, queue_depth), listen_comm, coll_comm, Connector::Gin)
        }
    })
}

unsafe extern "C" fn create_context(
    coll_comm: *mut c_void,
    n_signals: c_int,
    n_counters: c_int,
    n_contexts: c_int,
    gin_ctx: *mut *mut c_void,
    dev_handle: *mut *mut DeviceHandle,
) -> NcclResult {
    guard("createContext", || {
        let coll = shared::<Coll>(coll_comm)?;
        let kind = own::kind(&coll, dev_handle);
        if kind == EngineKind::Nccl {
            // SAFETY: passed on.
            return unsafe { create_context_of(coll_comm, gin_ctx, dev_handle) };
        }
        let asked = Asked {
            table: Table::V12,
            n_signals,
            n_counters,
            n_contexts,
            queue_depth: coll.connected_depth(),
            traffic_class: -1,
            rank_stride: 0,
        };
        // SAFETY: NULL or writable.
        unsafe { own::create_context(kind, coll_comm, gin_ctx, dev_handle, || Ok(asked)) }
    })
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
    connection_id: c_int,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: NCCL does not destroy the objects during a call; memory stays valid until the request is done.
    guard("iput", || unsafe {
        let args =
            PutArgs::new(connection_id, Place::new(src_off, src_mhandle), size, Place::new(dst_off, dst_mhandle), rank);
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
    connection_id: c_int,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: as in `iput`.
    guard("iputSignal", || unsafe {
        let args =
            PutArgs::new(connection_id, Place::new(src_off, src_mhandle), size, Place::new(dst_off, dst_mhandle), rank)
                .with_signal(Place::new(signal_off, signal_mhandle), signal_value, signal_op, true);
        data::started(request, || calls::put(set_of(coll_comm)?, &args))
    })
}

/// The table.
#[no_mangle]
#[allow(non_upper_case_globals)]
pub static ncclGinPlugin_v12: GinV12 = GinV12 {
    name: NAME.as_ptr(),
    init: Some(setup::init),
    devices: Some(setup::devices),
    get_properties: Some(own::get_properties_of_v12),
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
