//! RMA v14: signals are strong or weak.

use super::data::{self, iput_signal};
use super::fast::late::{Late, LatePut};
use super::guard::guard;
use super::{reg, setup, NAME};
use nccl_plugin_api::rma_v14::{ConfigV14, RmaV14};
use nccl_plugin_api::*;
use std::ffi::{c_int, c_void};

pub(super) unsafe extern "C" fn create_context(
    coll_comm: *mut c_void,
    config: *mut ConfigV14,
    rma_ctx: *mut *mut c_void,
) -> NcclResult {
    guard("createContext", || {
        let asked = || {
            // SAFETY: NULL or readable.
            let c = unsafe { config.as_ref() }.ok_or_else(|| super::guard::null("config"))?;
            setup::spec(c.n_contexts, 0, c.traffic_class)
        };
        // SAFETY: `rma_ctx` is NULL or writable.
        unsafe { setup::create_context(coll_comm, rma_ctx, asked) }
    })
}

iput_signal! { pub(super) (is_strong_signal: bool) strong: is_strong_signal, hints: None }

/// The table.
#[no_mangle]
#[allow(non_upper_case_globals)]
pub static ncclRmaPlugin_v14: RmaV14 = RmaV14 {
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
    iput: Some(super::gin_v13::iput),
    iput_signal: Some(iput_signal),
    iget: Some(super::gin_v13::iget),
    iflush: Some(data::iflush),
    test: Some(data::test),
    rma_progress: Some(setup::progress),
    query_last_error: Some(setup::query_last_error),
    finalize: Some(setup::finalize),
};
