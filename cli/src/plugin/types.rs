//! What goes into a table's functions and comes out of them, one shape for all versions.

use nccl_plugin_api::{NcclResult, PropertiesV11, PropertiesV12, VDeviceProps4, VDeviceProps8, OPT_AGGREGATE};
use std::ffi::{c_char, c_int, c_void, CStr};
use std::fmt;

/// What a call returns here when the table holds NULL for its function. No `ncclResult_t` has this value.
pub const MISSING: NcclResult = NcclResult(c_int::MIN);

/// A table function that did not return success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CallError {
    /// The table function, as NCCL calls it (`iputSignal`).
    pub call: &'static str,
    /// What it returned; [`MISSING`] when it is NULL.
    pub code: NcclResult,
}

impl std::error::Error for CallError {}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.code {
            MISSING => write!(f, "{} is NULL in this table", self.call),
            code => write!(f, "{} returned {} ({})", self.call, code.0, code_name(code)),
        }
    }
}

/// The name of a result code, as NCCL spells it.
pub fn code_name(code: NcclResult) -> &'static str {
    match code.0 {
        0 => "ncclSuccess",
        1 => "ncclUnhandledCudaError",
        2 => "ncclSystemError",
        3 => "ncclInternalError",
        4 => "ncclInvalidArgument",
        5 => "ncclInvalidUsage",
        6 => "ncclRemoteError",
        7 => "ncclInProgress",
        8 => "ncclTimeout",
        c_int::MIN => "function missing",
        _ => "not an ncclResult_t",
    }
}

/// Turns a code into a result that names the call.
pub fn check(call: &'static str, code: NcclResult) -> Result<(), CallError> {
    match code {
        NcclResult::SUCCESS => Ok(()),
        code => Err(CallError { call, code }),
    }
}

/// `getProperties` of any version; strings are copies.
#[derive(Clone, Debug, PartialEq)]
pub struct Properties {
    /// Device name; `None` if NULL.
    pub name: Option<String>,
    /// sysfs path of the PCI device; `None` if NULL.
    pub pci_path: Option<String>,
    /// Unique id of the NIC chip.
    pub guid: u64,
    /// `PTR_HOST`, `PTR_CUDA`, `PTR_DMABUF` or-ed.
    pub ptr_support: i32,
    /// Registrations hold for all communicators.
    pub reg_is_global: bool,
    /// Flush needed even for direct writes.
    pub force_flush: bool,
    /// Mbit/s.
    pub speed: i32,
    /// Port number, from 1.
    pub port: i32,
    /// Microseconds.
    pub latency: f32,
    /// Communicators at a time.
    pub max_comms: i32,
    /// 32 times this is the depth of NCCL's own proxy queue.
    pub max_recvs: i32,
    /// `DEVICE_*`.
    pub net_device_type: i32,
    /// Version of that device type's interface.
    pub net_device_version: i32,
    /// The physical devices behind this one (as many as `ndevs` says and the array holds).
    pub devs: Vec<i32>,
    /// `ndevs` as reported.
    pub ndevs: i32,
    /// Bytes.
    pub max_p2p_bytes: usize,
    /// Bytes.
    pub max_coll_bytes: usize,
    /// Largest multi-request.
    pub max_multi_request_size: i32,
    /// Rail number; `None` before v13.
    pub rail_id: Option<i16>,
    /// Plane number; `None` before v13.
    pub plane_id: Option<i16>,
}

/// # Safety
/// `s` is NULL or a C string.
unsafe fn owned(s: *const c_char) -> Option<String> {
    // SAFETY: as the caller promises.
    (!s.is_null()).then(|| unsafe { CStr::from_ptr(s) }.to_string_lossy().into_owned())
}

macro_rules! owned_properties {
    ($p:expr, $rail:expr, $plane:expr) => {
        Properties {
            // SAFETY: the plugin filled the pointers with NULL or C strings that live as long as it is loaded.
            name: unsafe { owned($p.name) },
            // SAFETY: as above.
            pci_path: unsafe { owned($p.pci_path) },
            guid: $p.guid,
            ptr_support: $p.ptr_support,
            reg_is_global: $p.reg_is_global != 0,
            force_flush: $p.force_flush != 0,
            speed: $p.speed,
            port: $p.port,
            latency: $p.latency,
            max_comms: $p.max_comms,
            max_recvs: $p.max_recvs,
            net_device_type: $p.net_device_type,
            net_device_version: $p.net_device_version,
            devs: $p.v_props.devs.iter().copied().take($p.v_props.ndevs.max(0) as usize).collect(),
            ndevs: $p.v_props.ndevs,
            max_p2p_bytes: $p.max_p2p_bytes,
            max_coll_bytes: $p.max_coll_bytes,
            max_multi_request_size: $p.max_multi_request_size,
            rail_id: $rail,
            plane_id: $plane,
        }
    };
}

impl Properties {
    /// # Safety
    /// A plugin has filled `p`.
    pub(super) unsafe fn from_v11(p: &PropertiesV11) -> Self {
        owned_properties!(p, None, None)
    }

    /// # Safety
    /// A plugin has filled `p`.
    pub(super) unsafe fn from_v12(p: &PropertiesV12) -> Self {
        owned_properties!(p, Some(p.rail_id), Some(p.plane_id))
    }
}

/// A structure for the plugin to fill; strings NULL, so that what it leaves out shows.
pub(super) fn blank_v11() -> PropertiesV11 {
    PropertiesV11 {
        name: std::ptr::null_mut(),
        pci_path: std::ptr::null_mut(),
        guid: 0,
        ptr_support: 0,
        reg_is_global: 0,
        force_flush: 0,
        speed: 0,
        port: 0,
        latency: 0.0,
        max_comms: 0,
        max_recvs: 0,
        net_device_type: 0,
        net_device_version: 0,
        v_props: VDeviceProps4 { ndevs: 0, devs: [0; 4] },
        max_p2p_bytes: 0,
        max_coll_bytes: 0,
        max_multi_request_size: 0,
    }
}

/// As [`blank_v11`], for the longer structure.
pub(super) fn blank_v12() -> PropertiesV12 {
    PropertiesV12 {
        name: std::ptr::null_mut(),
        pci_path: std::ptr::null_mut(),
        guid: 0,
        ptr_support: 0,
        reg_is_global: 0,
        force_flush: 0,
        speed: 0,
        port: 0,
        latency: 0.0,
        max_comms: 0,
        max_recvs: 0,
        net_device_type: 0,
        net_device_version: 0,
        v_props: VDeviceProps8 { ndevs: 0, devs: [0; 8] },
        max_p2p_bytes: 0,
        max_coll_bytes: 0,
        max_multi_request_size: 0,
        rail_id: 0,
        plane_id: 0,
    }
}

/// What `createContext` (and `connect` of GIN v12) is asked for. A table takes what its version knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextConfig {
    /// Signals a context that the plugin manages (GIN tables).
    pub n_signals: i32,
    /// Counters a context (GIN tables).
    pub n_counters: i32,
    /// Contexts wanted; GIN v12 also connects this many connections.
    pub n_contexts: i32,
    /// Queue entries a (context, peer); 0 leaves it to the plugin (GIN v12, v13, v14, RMA v13).
    pub queue_depth: i32,
    /// -1 leaves it to the environment (from v13 on).
    pub traffic_class: i32,
    /// Layout of device structures (GIN v14).
    pub backend_version: i32,
    /// Distance between ranks that talk to each other (GIN v14, RMA v14 and newer).
    pub rank_stride: i32,
}

impl Default for ContextConfig {
    fn default() -> Self {
        Self {
            n_signals: 0,
            n_counters: 0,
            n_contexts: 1,
            queue_depth: 0,
            traffic_class: -1,
            backend_version: 0,
            rank_stride: 1,
        }
    }
}

/// The objects that operations are addressed to. Which of the two a version takes is the table's affair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// What `connect` made.
    pub coll_comm: *mut c_void,
    /// What `createContext` made.
    pub ctx: *mut c_void,
}

/// A put, or the put part of a put with signal. Plain values: anything may be wrong on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Put {
    /// Context number (connection number in GIN v12; nothing in v11).
    pub context: i32,
    /// Bytes into the source window.
    pub src_off: u64,
    /// Source window, of this rank.
    pub src: *mut c_void,
    /// Bytes.
    pub size: usize,
    /// Bytes into the destination window.
    pub dst_off: u64,
    /// Destination window: this rank's handle of it.
    pub dst: *mut c_void,
    /// Destination rank.
    pub rank: u32,
    /// `OPT_*` (RMA v15 and newer).
    pub opt_flags: u32,
}

/// The signal part of a put with signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Signal {
    /// Bytes into the signal window.
    pub off: u64,
    /// Signal window: this rank's handle of it.
    pub mh: *mut c_void,
    /// What to add.
    pub value: u64,
    /// `SIGNAL_OP_*`.
    pub op: u32,
    /// Strong or weak (RMA v14 and newer).
    pub strong: bool,
}

/// A get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Get {
    /// Context number.
    pub context: i32,
    /// Bytes into the remote window.
    pub remote_off: u64,
    /// Remote window: this rank's handle of it.
    pub remote: *mut c_void,
    /// Bytes.
    pub size: usize,
    /// Bytes into the local window.
    pub local_off: u64,
    /// Local window.
    pub local: *mut c_void,
    /// Source rank.
    pub rank: u32,
    /// `OPT_*` (RMA v15 and newer).
    pub opt_flags: u32,
}

impl Put {
    /// Says that more operations follow at once, where the table can say so.
    pub fn more(mut self, more: bool) -> Self {
        self.opt_flags = if more { OPT_AGGREGATE } else { 0 };
        self
    }
}
