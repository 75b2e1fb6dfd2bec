//! `ncclRmaPlugin_v16`: NCCL 2.32 and newer. Adds `getRmaProperties`.

use crate::common::*;
use crate::rma_v14::CreateContextFn;
use crate::rma_v15::{GetFn, PutFn, PutSignalFn};
use core::ffi::{c_char, c_void};

/// `ncclRmaProperties_v16_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RmaPropertiesV16 {
    /// A visible signal implies every put received before it, from any peer.
    pub flushes_all_puts_on_any_signal: bool,
}

/// `getRmaProperties`.
pub type RmaPropertiesFn = unsafe extern "C" fn(coll_comm: *mut c_void, props: *mut RmaPropertiesV16) -> NcclResult;

/// The symbol NCCL looks up.
pub const SYMBOL: &core::ffi::CStr = c"ncclRmaPlugin_v16";

/// `ncclRma_v16_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RmaV16 {
    /// Name, for logs; a C string that lives as long as the library.
    pub name: *const c_char,
    /// Start for one communicator.
    pub init: Option<InitFn>,
    /// Number of devices.
    pub devices: Option<DevicesFn>,
    /// What this RMA implementation can do.
    pub get_rma_properties: Option<RmaPropertiesFn>,
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
unsafe impl Sync for RmaV16 {}
