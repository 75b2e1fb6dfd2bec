//! `ncclRmaPlugin_v13`: the same table as GIN v13 under another name.

pub use crate::gin_v13::{ConfigV13, CreateContextFn, GinV13 as RmaV13, PutSignalFn};

/// The symbol NCCL looks up.
pub const SYMBOL: &core::ffi::CStr = c"ncclRmaPlugin_v13";
