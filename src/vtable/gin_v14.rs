//! GIN v14: set-up only. Device code writes into queues of this library's, or NCCL's proxy drives the RMA table.

use super::guard::{guard, null, shared, store};
use super::own::{self, Asked};
use super::{reg, setup, NAME};
use crate::comm::coll::Coll;
use crate::comm::contexts::EngineKind;
use crate::error::Error;
use crate::proxy::descriptor::layout::Table;
use nccl_plugin_api::gin_v14::{ConfigV14, GinPropertiesV14, GinV14};
use nccl_plugin_api::*;
use std::ffi::c_void;

unsafe extern "C" fn get_gin_properties(props: *mut GinPropertiesV14) -> NcclResult {
    let value = GinPropertiesV14 { supports_strong_signals: true, supports_va_signals: true };
    // SAFETY: NULL or writable.
    guard("getGinProperties", || unsafe { store("props", props, value) })
}

/// With NCCL's engine it refuses with the remedy: its proxy over our RMA table does the same work.
unsafe extern "C" fn create_context(
    coll_comm: *mut c_void,
    config: *mut ConfigV14,
    gin_ctx: *mut *mut c_void,
    dev_handle: *mut *mut DeviceHandle,
) -> NcclResult {
    guard("createContext", || {
        let coll = shared::<Coll>(coll_comm)?;
        let kind = coll.engine_kind();
        if kind != EngineKind::Nccl {
            let asked = || {
                // SAFETY: NULL or readable.
                let c = unsafe { config.as_ref() }.ok_or_else(|| null("config"))?;
                Ok(Asked {
                    table: Table::V14(c.backend_version),
                    n_signals: c.n_signals,
                    n_counters: c.n_counters,
                    n_contexts: c.n_contexts,
                    queue_depth: c.queue_depth,
                    traffic_class: c.traffic_class,
                    rank_stride: c.rank_stride,
                })
            };
            // SAFETY: NULL or writable.
            return unsafe { own::create_context(kind, coll_comm, gin_ctx, dev_handle, asked) };
        }
        let why = match config.is_null() {
            true => null("config"),
            false => Error::usage(
                "the GIN v14 table has contexts where its queues are this library's, and OXYGIN_ENGINE or \
                 NCCL_GIN_TYPE say that they are NCCL's: set NCCL_RMA_PLUGIN to this library, so that NCCL's proxy \
                 drives it through the RMA table, or OXYGIN_ENGINE=own",
            ),
        };
        coll.refuse("createContext", why)
    })
}

/// The table.
#[no_mangle]
#[allow(non_upper_case_globals)]
pub static ncclGinPlugin_v14: GinV14 = GinV14 {
    name: NAME.as_ptr(),
    init: Some(setup::init),
    devices: Some(setup::devices),
    get_gin_properties: Some(get_gin_properties),
    get_properties: Some(own::get_properties_of_v14),
    listen: Some(setup::listen),
    connect: Some(setup::connect_gin_v14),
    create_context: Some(create_context),
    reg_mr_sym: Some(reg::gin_reg),
    reg_mr_sym_dma_buf: Some(reg::gin_reg_dma_buf),
    dereg_mr_sym: Some(reg::dereg),
    destroy_context: Some(setup::destroy_context),
    close_coll: Some(setup::close_coll),
    close_listen: Some(setup::close_listen),
    gin_progress: Some(setup::progress),
    query_last_error: Some(setup::query_last_error),
    finalize: Some(setup::finalize_any),
};
