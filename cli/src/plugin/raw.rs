//! The tables of all versions, and what is done with whichever it is.

use nccl_plugin_api as api;

/// A copy of the plugin's table: function pointers, so that a call costs one predicted branch and one indirect call.
#[derive(Clone, Copy)]
pub(super) enum Raw {
    GinV11(api::gin_v11::GinV11),
    GinV12(api::gin_v12::GinV12),
    GinV13(api::gin_v13::GinV13),
    GinV14(api::gin_v14::GinV14),
    RmaV13(api::rma_v13::RmaV13),
    RmaV14(api::rma_v14::RmaV14),
    RmaV15(api::rma_v15::RmaV15),
    RmaV16(api::rma_v16::RmaV16),
}

/// Evaluates an expression with `$t` bound to the table, whatever its version.
macro_rules! any {
    ($raw:expr, $t:ident => $e:expr) => {
        match $raw {
            Raw::GinV11($t) => $e,
            Raw::GinV12($t) => $e,
            Raw::GinV13($t) => $e,
            Raw::GinV14($t) => $e,
            Raw::RmaV13($t) => $e,
            Raw::RmaV14($t) => $e,
            Raw::RmaV15($t) => $e,
            Raw::RmaV16($t) => $e,
        }
    };
}

/// Calls a function of the table, or returns [`MISSING`] if it is NULL.
macro_rules! call {
    ($function:expr, $($argument:expr),*) => {
        match $function {
            // SAFETY: the table is the plugin's own; what the arguments must be is the caller's promise.
            Some(f) => unsafe { f($($argument),*) },
            None => MISSING,
        }
    };
}

/// Names the functions of a table that are NULL.
macro_rules! nulls {
    ($t:expr; $($field:ident $name:literal),* $(,)?) => {{
        let mut missing = Vec::new();
        $(if $t.$field.is_none() { missing.push($name); })*
        missing
    }};
}

pub(super) use {any, call, nulls};
