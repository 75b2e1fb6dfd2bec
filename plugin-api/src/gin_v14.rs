//! `ncclGinPlugin_v14`: NCCL 2.30.7 and newer. No data operations: device code has a queue of its own.

use crate::common::*;
use core::ffi::{c_char, c_int, c_void};

/// `ncclGinProperties_v14_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct GinPropertiesV14 {
    /// Strong signals are there.
    pub supports_strong_signals: bool,
    /// Signals by window and offset are there.
    pub supports_va_signals: bool,
}

/// `ncclGinConfig_v14_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ConfigV14 {
    /// Signals a context.
    pub n_signals: c_int,
    /// Counters a context.
    pub n_counters: c_int,
    /// Contexts wanted.
    pub n_contexts: c_int,
    /// Queue entries a (context, peer); 0 leaves it to the plugin.
    pub queue_depth: c_int,
    /// Traffic class; -1 leaves it to the environment.
    pub traffic_class: c_int,
    /// Layout of the device structures that device code expects.
    pub backend_version: c_int,
    /// Distance between the ranks that will talk to each other.
    pub rank_stride: c_int,
}

/// `getGinProperties`.
pub type GinPropertiesFn = unsafe extern "C" fn(props: *mut GinPropertiesV14) -> NcclResult;
/// `createContext` of v14, collective.
pub type CreateContextFn = unsafe extern "C" fn(
    coll_comm: *mut c_void,
    config: *mut ConfigV14,
    gin_ctx: *mut *mut c_void,
    dev_handle: *mut *mut DeviceHandle,
) -> NcclResult;

/// The symbol NCCL looks up.
pub const SYMBOL: &core::ffi::CStr = c"ncclGinPlugin_v14";

/// `ncclGin_v14_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct GinV14 {
    /// Name, for logs; a C string that lives as long as the library.
    pub name: *const c_char,
    /// Start for one communicator.
    pub init: Option<InitFn>,
    /// Number of devices.
    pub devices: Option<DevicesFn>,
    /// What this GIN implementation can do.
    pub get_gin_properties: Option<GinPropertiesFn>,
    /// Properties of one device.
    pub get_properties: Option<PropertiesV12Fn>,
    /// Open for the peers.
    pub listen: Option<ListenFn>,
    /// Join the ranks; collective.
    pub connect: Option<ConnectFn>,
    /// Make the contexts; collective.
    pub create_context: Option<CreateContextFn>,
    /// Register a window by address; collective.
    pub reg_mr_sym: Option<GinRegFn>,
    /// Register a window by DMA-BUF; collective.
    pub reg_mr_sym_dma_buf: Option<GinRegDmaBufFn>,
    /// End a registration.
    pub dereg_mr_sym: Option<DeregFn>,
    /// End what `create_context` made.
    pub destroy_context: Option<ObjectFn>,
    /// End what `connect` made.
    pub close_coll: Option<ObjectFn>,
    /// End what `listen` made.
    pub close_listen: Option<ObjectFn>,
    /// Let operations advance; may be NULL.
    pub gin_progress: Option<ObjectFn>,
    /// Whether something failed.
    pub query_last_error: Option<QueryLastErrorFn>,
    /// End what `init` made.
    pub finalize: Option<ObjectFn>,
}

// SAFETY: the table is immutable; `name` points at a constant string.
unsafe impl Sync for GinV14 {}
