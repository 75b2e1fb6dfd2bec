//! RMA v13: the GIN v13 table under another name.

use nccl_plugin_api::rma_v13::RmaV13;

/// The table.
#[no_mangle]
#[allow(non_upper_case_globals)]
pub static ncclRmaPlugin_v13: RmaV13 = super::gin_v13::TABLE;
