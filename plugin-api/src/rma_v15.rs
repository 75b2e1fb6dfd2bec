//! `ncclRmaPlugin_v15`: NCCL 2.31 and newer. Operations carry `OPT_*` flags.

use crate::common::*;
use crate::rma_v14::CreateContextFn;
use core::ffi::{c_char, c_int, c_void};

/// `iput` of v15.
pub type PutFn = unsafe extern "C" fn(
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
) -> NcclResult;
/// `iputSignal` of v15.
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
    is_strong_signal: bool,
    opt_flags: u32,
    request: *mut *mut c_void,
) -> NcclResult;
/// `iget` of v15.
pub type GetFn = unsafe extern "C" fn(
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
) -> NcclResult;

/// The symbol NCCL looks up.
pub const SYMBOL: &core::ffi::CStr = c"ncclRmaPlugin_v15";

/// `ncclRma_v15_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RmaV15 {
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
    pub reg_mr_sym: Option<RmaRegFn>,
    /// Register a window by DMA-BUF; collective.
    pub reg_mr_sym_dma_buf: Option<RmaRegDmaBufFn>,
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
    pub rma_progress: Option<ObjectFn>,
    /// Whether something failed.
    pub query_last_error: Option<QueryLastErrorFn>,
    /// End what `init` made.
    pub finalize: Option<ObjectFn>,
}

// SAFETY: the table is immutable; `name` points at a constant string.
unsafe impl Sync for RmaV15 {}
