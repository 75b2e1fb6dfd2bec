//! GIN v13, and RMA v13, which is the same table: operations name a context of a set; all signals are strong.

use super::guard::{guard, object};
use super::{setup, NAME};
use crate::fabric::verbs::Named;
use crate::rma::call::{self, GetArgs, Place, PutArgs, SignalArgs};
use crate::rma::contexts::Contexts;
use nccl_plugin_api::gin_v13::{ConfigV13, GinV13};
use nccl_plugin_api::*;
use std::ffi::{c_int, c_void};

/// NCCL 2.30 passes a NULL devHandle for a proxy-type plugin.
unsafe extern "C" fn create_context(
    coll_comm: *mut c_void,
    config: *mut ConfigV13,
    gin_ctx: *mut *mut c_void,
    dev_handle: *mut *mut DeviceHandle,
) -> NcclResult {
    guard("createContext", || {
        // SAFETY: NULL or readable.
        let c = unsafe { config.as_ref() }.ok_or_else(|| super::guard::null("config"))?;
        // SAFETY: the pointers are NULL or writable. There is no device handle: NCCL's own proxy serves the GPU.
        unsafe {
            setup::create_context(coll_comm, c.n_contexts, c.queue_depth, c.traffic_class, gin_ctx)?;
            if !dev_handle.is_null() {
                dev_handle.write(std::ptr::null_mut());
            }
        }
        Ok(())
    })
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
    let args = PutArgs {
        context,
        src: Place { offset: src_off, window: src_mhandle },
        size,
        dst: Place { offset: dst_off, window: dst_mhandle },
        rank,
        signal: None,
        more: false,
    };
    // SAFETY: NCCL does not destroy the objects during a call; memory stays valid until the request is done.
    unsafe { setup::start_put("iput", ctx, &args, request) }
}

#[allow(clippy::too_many_arguments)]
pub(super) unsafe extern "C" fn iput_signal(
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
    request: *mut *mut c_void,
) -> NcclResult {
    let named = Named {
        src: src_mhandle as u64,
        src_off,
        size: size as u64,
        dst: dst_mhandle as u64,
        dst_off,
        sig: signal_mhandle as u64,
        sig_off: signal_off,
        value: signal_value,
    };
    // SAFETY: NCCL does not destroy the objects during a call; memory stays valid until the request is done.
    if unsafe { call::put_again(ctx, context, rank, signal_op, named, request) } {
        return NcclResult::SUCCESS;
    }
    // Same arguments in the same order: a jump, for which the short way need not keep anything.
    // SAFETY: passed on.
    unsafe {
        iput_signal_long(
            ctx,
            context,
            src_off,
            src_mhandle,
            size,
            dst_off,
            dst_mhandle,
            rank,
            signal_off,
            signal_mhandle,
            signal_value,
            signal_op,
            request,
        )
    }
}

#[allow(clippy::too_many_arguments)]
#[inline(never)]
unsafe extern "C" fn iput_signal_long(
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
    request: *mut *mut c_void,
) -> NcclResult {
    let args = PutArgs {
        context,
        src: Place { offset: src_off, window: src_mhandle },
        size,
        dst: Place { offset: dst_off, window: dst_mhandle },
        rank,
        signal: Some(SignalArgs {
            place: Place { offset: signal_off, window: signal_mhandle },
            value: signal_value,
            op: signal_op,
            strong: true,
        }),
        more: false,
    };
    // SAFETY: as in `iput_signal`.
    unsafe { setup::start_put_signal(ctx, &args, request) }
}

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
        let args = GetArgs {
            context,
            remote: Place { offset: remote_off, window: remote_mhandle },
            size,
            local: Place { offset: local_off, window: local_mhandle },
            rank,
            more: false,
        };
        setup::started(request, || call::get(object::<Contexts>(ctx)?, &args))
    })
}

/// Both symbols name the same functions.
pub(super) const TABLE: GinV13 = GinV13 {
    name: NAME.as_ptr(),
    init: Some(setup::init),
    devices: Some(setup::devices),
    get_properties: Some(setup::get_properties_v12),
    listen: Some(setup::listen),
    connect: Some(setup::connect),
    create_context: Some(create_context),
    reg_mr_sym: Some(setup::gin_reg),
    reg_mr_sym_dma_buf: Some(setup::gin_reg_dma_buf),
    dereg_mr_sym: Some(setup::dereg),
    destroy_context: Some(setup::destroy_context),
    close_coll: Some(setup::close_coll),
    close_listen: Some(setup::close_listen),
    iput: Some(iput),
    iput_signal: Some(iput_signal),
    iget: Some(iget),
    iflush: Some(setup::iflush),
    test: Some(setup::test),
    gin_progress: Some(setup::progress),
    query_last_error: Some(setup::query_last_error),
    finalize: Some(setup::finalize),
};

/// The table.
#[no_mangle]
#[allow(non_upper_case_globals)]
pub static ncclGinPlugin_v13: GinV13 = TABLE;
