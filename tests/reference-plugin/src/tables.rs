//! The exported tables.

use crate::operations::*;
use crate::setup::*;
use nccl_plugin_api::gin_v13::GinV13;
use nccl_plugin_api::rma_v14::RmaV14;
use nccl_plugin_api::rma_v16::RmaV16;

/// GIN v13.
#[no_mangle]
pub static ncclGinPlugin_v13: GinV13 = GinV13 {
    name: c"reference".as_ptr(),
    init: Some(init),
    devices: Some(devices),
    get_properties: Some(get_properties_gin),
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
