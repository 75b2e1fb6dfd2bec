//! RMA v15: operations carry `OPT_*` hints.

use super::calls;
use super::data::{self, iput_signal};
use super::fast::late::{Late, LatePut};
use super::guard::{guard, object};
use super::rma_v14::create_context;
use super::{reg, setup, NAME};
use crate::comm::contexts::Contexts;
use crate::rma::args::{GetArgs, Place, PutArgs};
use nccl_plugin_api::rma_v15::RmaV15;
use nccl_plugin_api::*;
use std::ffi::{c_int, c_void};

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
    opt_flags: u32,
    request: *mut *mut c_void,
) -> NcclResult {
    let args = PutArgs::new(context, Place::new(src_off, src_mhandle), size, Place::new(dst_off, dst_mhandle), rank)
        .with_hints(opt_flags);
    // SAFETY: NCCL does not destroy the objects during a call; memory stays valid until the request is done.
    unsafe { data::start_put("iput", ctx, &args, request) }
}

iput_signal! {
    pub(super) (is_strong_signal: bool, opt_flags: u32)
    strong: is_strong_signal, hints: Some(Late(&opt_flags))
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
    opt_flags: u32,
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
        )
        .with_hints(opt_flags);
        data::started(request, || calls::get(object::<Contexts>(ctx)?, &args))
    })
}

/// The table.
#[no_mangle]
#[allow(non_upper_case_globals)]
pub static ncclRmaPlugin_v15: RmaV15 = RmaV15 {
    name: NAME.as_ptr(),
    init: Some(setup::init_rma),
    devices: Some(setup::devices),
    get_properties: Some(setup::get_properties_v12),
    listen: Some(setup::listen),
    connect: Some(setup::connect),
    create_context: Some(create_context),
    reg_mr_sym: Some(reg::rma_reg),
    reg_mr_sym_dma_buf: Some(reg::rma_reg_dma_buf),
    dereg_mr_sym: Some(reg::dereg),
    destroy_context: Some(setup::destroy_context),
    close_coll: Some(setup::close_coll),
    close_listen: Some(setup::close_listen),
    iput: Some(iput),
    iput_signal: Some(iput_signal),
    iget: Some(iget),
    iflush: Some(data::iflush),
    test: Some(data::test),
    rma_progress: Some(setup::progress),
    query_last_error: Some(setup::query_last_error),
    finalize: Some(setup::finalize),
};
