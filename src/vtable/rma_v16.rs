//! RMA v16: v15 and what this implementation promises.

use super::guard::{guard, object, store};
use super::rma_v14::create_context;
use super::rma_v15::{iget, iput, iput_signal};
use super::{data, reg, setup, NAME};
use crate::comm::coll::Coll;
use nccl_plugin_api::rma_v16::{RmaPropertiesV16, RmaV16};
use nccl_plugin_api::NcclResult;
use std::ffi::c_void;

unsafe extern "C" fn get_rma_properties(coll_comm: *mut c_void, props: *mut RmaPropertiesV16) -> NcclResult {
    // SAFETY: NCCL does not close the communicator during a call with it; `props` is NULL or writable.
    guard("getRmaProperties", || unsafe {
        object::<Coll>(coll_comm)?;
        let value = RmaPropertiesV16 { flushes_all_puts_on_any_signal: Coll::FLUSHES_ALL_PUTS_ON_ANY_SIGNAL };
        store("props", props, value)
    })
}

/// The table.
#[no_mangle]
#[allow(non_upper_case_globals)]
pub static ncclRmaPlugin_v16: RmaV16 = RmaV16 {
    name: NAME.as_ptr(),
    init: Some(setup::init_rma),
    devices: Some(setup::devices),
    get_rma_properties: Some(get_rma_properties),
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
