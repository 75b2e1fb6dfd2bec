//! GIN v13, and RMA v13, which is the same table: operations name a context of a set; all signals are strong.

use super::calls;
use super::data::{self, iput_signal};
use super::fast::late::{Late, LatePut};
use super::guard::{guard, null, object, shared};
use super::own::{self, Asked};
use super::{reg, setup, NAME};
use crate::comm::coll::Coll;
use crate::comm::contexts::{Contexts, EngineKind};
use crate::error::Result;
use crate::proxy::descriptor::layout::Table;
use crate::rma::args::{GetArgs, Place, PutArgs};
use nccl_plugin_api::gin_v13::{ConfigV13, GinV13};
use nccl_plugin_api::*;
use std::ffi::{c_int, c_void};

/// createContext where NCCL's proxy drains its own queues: there is no device handle. NCCL 2.30 passes a NULL one.
unsafe extern "C" fn create_context(
    coll_comm: *mut c_void,
    config: *mut ConfigV13,
    gin_ctx: *mut *mut c_void,
    dev_handle: *mut *mut DeviceHandle,
) -> NcclResult {
    // SAFETY: passed on.
    guard("createContext", || unsafe { create_proxied(coll_comm, config, gin_ctx, dev_handle) })
}

/// # Safety
/// The pointers are NULL, or readable and writable.
unsafe fn create_proxied(
    coll_comm: *mut c_void,
    config: *mut ConfigV13,
    gin_ctx: *mut *mut c_void,
    dev_handle: *mut *mut DeviceHandle,
) -> Result<()> {
    let asked = || {
        // SAFETY: NULL or readable.
        let c = unsafe { config.as_ref() }.ok_or_else(|| null("config"))?;
        setup::spec(c.n_contexts, c.queue_depth, c.traffic_class)
    };
    // SAFETY: the pointers are NULL or writable.
    unsafe {
        setup::create_context(coll_comm, gin_ctx, asked)?;
        if !dev_handle.is_null() {
            dev_handle.write(std::ptr::null_mut());
        }
    }
    Ok(())
}

#[allow(clippy::too_many_arguments)]
pub(super) unsafe extern "C" fn iput(
    ctx: *mut c_void,
    context: c_int,
    src_off: u64,
    src_mhandle: *mut c_void,
    size: usize,
    dst_off: u64,
    dst_mhandle: *mut c_void,
    rank: u32,
    request: *mut *mut c_void,
) -> NcclResult {
    let args = PutArgs::new(context, Place::new(src_off, src_mhandle), size, Place::new(dst_off, dst_mhandle), rank);
    // SAFETY: NCCL does not destroy the objects during a call; memory stays valid until the request is done.
    unsafe { data::start_put("iput", ctx, &args, request) }
}

iput_signal! { pub(super) () strong: true, hints: None }

#[allow(clippy::too_many_arguments)]
pub(super) unsafe extern "C" fn iget(
    ctx: *mut c_void,
    context: c_int,
    remote_off: u64,
    remote_mhandle: *mut c_void,
    size: usize,
    local_off: u64,
    local_mhandle: *mut c_void,
    rank: u32,
    request: *mut *mut c_void,
) -> NcclResult {
    // SAFETY: as in `iput`; the destination stays writable until the request is done.
    guard("iget", || unsafe {
        let args = GetArgs::new(
            context,
            Place::new(remote_off, remote_mhandle),
            size,
            Place::new(local_off, local_mhandle),
            rank,
        );
        data::started(request, || calls::get(object::<Contexts>(ctx)?, &args))
    })
}

/// createContext of the GIN table: with queues of this library's, unless NCCL's engine is to drain its own.
unsafe extern "C" fn create_gin_context(
    coll_comm: *mut c_void,
    config: *mut ConfigV13,
    gin_ctx: *mut *mut c_void,
    dev_handle: *mut *mut DeviceHandle,
) -> NcclResult {
    guard("createContext", || {
        let kind = own::kind(&*shared::<Coll>(coll_comm)?, dev_handle);
        if kind == EngineKind::Nccl {
            // SAFETY: passed on.
            return unsafe { create_proxied(coll_comm, config, gin_ctx, dev_handle) };
        }
        let asked = || {
            // SAFETY: NULL or readable.
            let c = unsafe { config.as_ref() }.ok_or_else(|| null("config"))?;
            Ok(Asked {
                table: Table::V13,
                n_signals: c.n_signals,
                n_counters: c.n_counters,
                n_contexts: c.n_contexts,
                queue_depth: c.queue_depth,
                traffic_class: c.traffic_class,
                rank_stride: 0,
            })
        };
        // SAFETY: NULL or writable.
        unsafe { own::create_context(kind, coll_comm, gin_ctx, dev_handle, asked) }
    })
}

/// The RMA table; the GIN table differs in who drains its contexts' queues.
pub(super) const TABLE: GinV13 = GinV13 {
    name: NAME.as_ptr(),
    init: Some(setup::init_rma),
    devices: Some(setup::devices),
    get_properties: Some(setup::get_properties_v12),
    listen: Some(setup::listen),
    connect: Some(setup::connect),
    create_context: Some(create_context),
    reg_mr_sym: Some(reg::gin_reg),
    reg_mr_sym_dma_buf: Some(reg::gin_reg_dma_buf),
    dereg_mr_sym: Some(reg::dereg),
    destroy_context: Some(setup::destroy_context),
    close_coll: Some(setup::close_coll),
    close_listen: Some(setup::close_listen),
    iput: Some(iput),
    iput_signal: Some(iput_signal),
    iget: Some(iget),
    iflush: Some(data::iflush),
    test: Some(data::test),
    gin_progress: Some(setup::progress),
    query_last_error: Some(setup::query_last_error_any),
    finalize: Some(setup::finalize_any),
};

/// The table.
#[no_mangle]
#[allow(non_upper_case_globals)]
pub static ncclGinPlugin_v13: GinV13 = GinV13 {
    init: Some(setup::init),
    get_properties: Some(own::get_properties_of_v13),
    connect: Some(setup::connect_gin),
    create_context: Some(create_gin_context),
    ..TABLE
};
