//! `ncclGinPlugin_v13`: NCCL 2.30.3 and newer. Operations name a context; gets and flushes arrive.

use crate::common::*;
use core::ffi::{c_char, c_int, c_void};

/// `ncclGinConfig_v13_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ConfigV13 {
    /// Signals a context.
    pub n_signals: c_int,
    /// Counters a context.
    pub n_counters: c_int,
    /// Contexts wanted.
    pub n_contexts: c_int,
    /// Queue entries a (context, peer); 0 leaves it to the plugin.
    pub queue_depth: c_int,
    /// Traffic class; -1 (NCCL's undefined) leaves it to the environment.
    pub traffic_class: c_int,
}

/// `createContext` of v13, collective.
pub type CreateContextFn = unsafe extern "C" fn(
    coll_comm: *mut c_void,
    config: *mut ConfigV13,
    gin_ctx: *mut *mut c_void,
    dev_handle: *mut *mut DeviceHandle,
) -> NcclResult;
/// `iputSignal` of v13; signals are strong.
pub type PutSignalFn = unsafe extern "C" fn(
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
) -> NcclResult;

/// The symbol NCCL looks up.
pub const SYMBOL: &core::ffi::CStr = c"ncclGinPlugin_v13";

/// `ncclGin_v13_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct GinV13 {
    /// Name, for logs; a C string that lives as long as the library.
    pub name: *const c_char,
    /// Start for one communicator.
    pub init: Option<InitFn>,
    /// Number of devices.
    pub devices: Option<DevicesFn>,
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
    /// Write to a peer.
    pub iput: Option<PutFn>,
    /// Write to a peer, then add to a signal there.
    pub iput_signal: Option<PutSignalFn>,
    /// Read from a peer.
    pub iget: Option<GetFn>,
    /// Order earlier gets before what follows.
    pub iflush: Option<FlushFn>,
    /// Ask whether a request is locally complete.
    pub test: Option<TestFn>,
    /// Let operations advance; may be NULL.
    pub gin_progress: Option<ObjectFn>,
    /// Whether something failed.
    pub query_last_error: Option<QueryLastErrorFn>,
    /// End what `init` made.
    pub finalize: Option<ObjectFn>,
}

// SAFETY: the table is immutable; `name` points at a constant string.
unsafe impl Sync for GinV13 {}
