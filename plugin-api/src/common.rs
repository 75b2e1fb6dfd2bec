//! What all table versions share: result codes, the logger, device properties.

use core::ffi::{c_char, c_int, c_ulong, c_void};

/// `ncclResult_t`: what every table function returns.
#[repr(transparent)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NcclResult(pub c_int);

impl NcclResult {
    /// The call did what it says.
    pub const SUCCESS: Self = Self(0);
    /// A CUDA call failed.
    pub const UNHANDLED_CUDA_ERROR: Self = Self(1);
    /// A system or library call failed.
    pub const SYSTEM_ERROR: Self = Self(2);
    /// A fault of the plugin itself.
    pub const INTERNAL_ERROR: Self = Self(3);
    /// An argument has a value it may not have.
    pub const INVALID_ARGUMENT: Self = Self(4);
    /// The call is right, but not now or not in this configuration.
    pub const INVALID_USAGE: Self = Self(5);
    /// A peer or the path to it failed.
    pub const REMOTE_ERROR: Self = Self(6);
    /// The operation goes on in the background.
    pub const IN_PROGRESS: Self = Self(7);
    /// A deadline passed.
    pub const TIMEOUT: Self = Self(8);
}

/// Bytes of the handle that `listen` fills and NCCL hands to every rank
/// (`NCCL_NET_HANDLE_MAXSIZE`).
pub const HANDLE_BYTES: usize = 128;

/// `NCCL_PTR_HOST`: memory the CPU addresses.
pub const PTR_HOST: c_int = 1;
/// `NCCL_PTR_CUDA`: memory on a GPU.
pub const PTR_CUDA: c_int = 2;
/// `NCCL_PTR_DMABUF`: GPU memory that can be registered by a DMA-BUF descriptor.
pub const PTR_DMABUF: c_int = 4;

/// Registration flag: accesses keep strict order (signals live here).
pub const MR_FLAG_FORCE_SO: u64 = 1;
/// Registration flag: signals that start at zero and are never reset.
pub const MR_FLAG_SIGNALS_NEVER_RESET: u64 = 2;

/// `NCCL_GIN_SIGNAL_OP_INC`: add one, whatever the value argument says.
pub const SIGNAL_OP_INC: u32 = 1;
/// `NCCL_GIN_SIGNAL_OP_ADD`: add the value argument.
pub const SIGNAL_OP_ADD: u32 = 2;

/// RMA v15 `optFlags`: more requests follow at once; a hint only.
pub const OPT_AGGREGATE: u32 = 1;

/// `NCCL_NET_DEVICE_*`: who drives the network for device code.
pub const DEVICE_HOST: c_int = 0;
/// A proxy thread on the CPU.
pub const DEVICE_GIN_PROXY: c_int = 2;
/// The GPU rings the NIC itself.
pub const DEVICE_GIN_GDAKI: c_int = 3;

/// `ncclDebugLogger_t` levels.
pub const LOG_WARN: c_int = 2;
/// Shown with `NCCL_DEBUG=INFO`.
pub const LOG_INFO: c_int = 3;
/// Shown with `NCCL_DEBUG=TRACE`.
pub const LOG_TRACE: c_int = 5;
/// Subsystem mask bit: set-up.
pub const SUBSYS_INIT: c_ulong = 0x1;
/// Subsystem mask bit: network.
pub const SUBSYS_NET: c_ulong = 0x10;

/// `ncclDebugLogger_t`: (level, subsystem mask, file, line, printf format, …).
pub type DebugLogger =
    unsafe extern "C" fn(level: c_int, subsys: c_ulong, file: *const c_char, line: c_int, fmt: *const c_char, ...);

/// `ncclNetVDeviceProps_v11_t`: the physical devices behind a virtual one.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct VDeviceProps4 {
    /// How many entries of `devs` hold.
    pub ndevs: c_int,
    /// Device numbers.
    pub devs: [c_int; 4],
}

/// `ncclNetVDeviceProps_v12_t`: the same with room for eight.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct VDeviceProps8 {
    /// How many entries of `devs` hold.
    pub ndevs: c_int,
    /// Device numbers.
    pub devs: [c_int; 8],
}

/// `ncclNetProperties_v11_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PropertiesV11 {
    /// Device name, for logs; owned by the plugin.
    pub name: *mut c_char,
    /// sysfs path of the PCI device, or NULL; owned by the plugin.
    pub pci_path: *mut c_char,
    /// Unique id of the NIC chip.
    pub guid: u64,
    /// Memory kinds: `PTR_HOST`, `PTR_CUDA`, `PTR_DMABUF` or-ed.
    pub ptr_support: c_int,
    /// Registrations hold for all communicators.
    pub reg_is_global: c_int,
    /// Flush needed even for direct writes.
    pub force_flush: c_int,
    /// Mbit/s.
    pub speed: c_int,
    /// Port number, from 1.
    pub port: c_int,
    /// Microseconds.
    pub latency: f32,
    /// Communicators at a time.
    pub max_comms: c_int,
    /// Grouped receives; 32 times this is the depth of NCCL's own proxy queue.
    pub max_recvs: c_int,
    /// `DEVICE_*`.
    pub net_device_type: c_int,
    /// Version of that device type's interface.
    pub net_device_version: c_int,
    /// The devices merged into this one.
    pub v_props: VDeviceProps4,
    /// Largest point-to-point transfer, bytes.
    pub max_p2p_bytes: usize,
    /// Largest collective transfer, bytes.
    pub max_coll_bytes: usize,
    /// Largest multi-request.
    pub max_multi_request_size: c_int,
}

/// `ncclNetProperties_v12_t`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct PropertiesV12 {
    /// Device name, for logs; owned by the plugin.
    pub name: *mut c_char,
    /// sysfs path of the PCI device, or NULL; owned by the plugin.
    pub pci_path: *mut c_char,
    /// Unique id of the NIC chip.
    pub guid: u64,
    /// Memory kinds: `PTR_HOST`, `PTR_CUDA`, `PTR_DMABUF` or-ed.
    pub ptr_support: c_int,
    /// Registrations hold for all communicators.
    pub reg_is_global: c_int,
    /// Flush needed even for direct writes.
    pub force_flush: c_int,
    /// Mbit/s.
    pub speed: c_int,
    /// Port number, from 1.
    pub port: c_int,
    /// Microseconds.
    pub latency: f32,
    /// Communicators at a time.
    pub max_comms: c_int,
    /// Grouped receives; 32 times this is the depth of NCCL's own proxy queue.
    pub max_recvs: c_int,
    /// `DEVICE_*`.
    pub net_device_type: c_int,
    /// Version of that device type's interface.
    pub net_device_version: c_int,
    /// The devices merged into this one.
    pub v_props: VDeviceProps8,
    /// Largest point-to-point transfer, bytes.
    pub max_p2p_bytes: usize,
    /// Largest collective transfer, bytes.
    pub max_coll_bytes: usize,
    /// Largest multi-request.
    pub max_multi_request_size: c_int,
    /// Rail number, or -1.
    pub rail_id: i16,
    /// Plane number, or -1.
    pub plane_id: i16,
}

/// `ncclNetDeviceHandle_v11_t`: what device code is given.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DeviceHandle {
    /// `DEVICE_*`.
    pub net_device_type: c_int,
    /// Version of that device type's interface.
    pub net_device_version: c_int,
    /// Array of GPU contexts, in memory the GPU reads.
    pub handle: *mut c_void,
    /// Bytes behind `handle`.
    pub size: usize,
    /// Non-zero: NCCL's proxy thread must call progress.
    pub needs_proxy_progress: c_int,
}

/// `init`: once per communicator; fills an opaque context.
pub type InitFn = unsafe extern "C" fn(ctx: *mut *mut c_void, comm_id: u64, log: Option<DebugLogger>) -> NcclResult;
/// `devices`: how many devices this plugin drives.
pub type DevicesFn = unsafe extern "C" fn(ndev: *mut c_int) -> NcclResult;
/// `getProperties` up to GIN v12.
pub type PropertiesV11Fn = unsafe extern "C" fn(dev: c_int, props: *mut PropertiesV11) -> NcclResult;
/// `getProperties` from GIN v13 on.
pub type PropertiesV12Fn = unsafe extern "C" fn(dev: c_int, props: *mut PropertiesV12) -> NcclResult;
/// `listen`: fills a 128-byte handle for the other ranks.
pub type ListenFn = unsafe extern "C" fn(
    ctx: *mut c_void,
    dev: c_int,
    handle: *mut c_void,
    listen_comm: *mut *mut c_void,
) -> NcclResult;
/// `connect`, collective (all versions but GIN v12).
pub type ConnectFn = unsafe extern "C" fn(
    ctx: *mut c_void,
    handles: *mut *mut c_void,
    nranks: c_int,
    rank: c_int,
    listen_comm: *mut c_void,
    coll_comm: *mut *mut c_void,
) -> NcclResult;
/// GIN `regMrSym`, collective.
pub type GinRegFn = unsafe extern "C" fn(
    coll_comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    ptr_type: c_int,
    mr_flags: u64,
    mhandle: *mut *mut c_void,
    gin_handle: *mut *mut c_void,
) -> NcclResult;
/// GIN `regMrSymDmaBuf`, collective.
pub type GinRegDmaBufFn = unsafe extern "C" fn(
    coll_comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    ptr_type: c_int,
    offset: u64,
    fd: c_int,
    mr_flags: u64,
    mhandle: *mut *mut c_void,
    gin_handle: *mut *mut c_void,
) -> NcclResult;
/// RMA `regMrSym` from v14 on: as GIN's, without a device handle.
pub type RmaRegFn = unsafe extern "C" fn(
    coll_comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    ptr_type: c_int,
    mr_flags: u64,
    mhandle: *mut *mut c_void,
) -> NcclResult;
/// RMA `regMrSymDmaBuf` from v14 on.
pub type RmaRegDmaBufFn = unsafe extern "C" fn(
    coll_comm: *mut c_void,
    data: *mut c_void,
    size: usize,
    ptr_type: c_int,
    offset: u64,
    fd: c_int,
    mr_flags: u64,
    mhandle: *mut *mut c_void,
) -> NcclResult;
/// `deregMrSym`.
pub type DeregFn = unsafe extern "C" fn(coll_comm: *mut c_void, mhandle: *mut c_void) -> NcclResult;
/// `destroyContext`, `closeColl`, `closeListen`, `finalize`, `ginProgress`, `rmaProgress`: one opaque object.
pub type ObjectFn = unsafe extern "C" fn(object: *mut c_void) -> NcclResult;
/// `test`: `*done` becomes 1 when the request is locally complete.
pub type TestFn = unsafe extern "C" fn(coll_comm: *mut c_void, request: *mut c_void, done: *mut c_int) -> NcclResult;
/// `queryLastError`.
pub type QueryLastErrorFn = unsafe extern "C" fn(ctx: *mut c_void, has_error: *mut bool) -> NcclResult;
/// `iput` of GIN v13 and RMA v13, v14.
pub type PutFn = unsafe extern "C" fn(
    ctx: *mut c_void,
    context: c_int,
    src_off: u64,
    src_mhandle: *mut c_void,
    size: usize,
    dst_off: u64,
    dst_mhandle: *mut c_void,
    rank: u32,
    request: *mut *mut c_void,
) -> NcclResult;
/// `iget` of GIN v13 and RMA v13, v14.
pub type GetFn = unsafe extern "C" fn(
    ctx: *mut c_void,
    context: c_int,
    remote_off: u64,
    remote_mhandle: *mut c_void,
    size: usize,
    local_off: u64,
    local_mhandle: *mut c_void,
    rank: u32,
    request: *mut *mut c_void,
) -> NcclResult;
/// `iflush`; the request may come back NULL: done.
pub type FlushFn = unsafe extern "C" fn(
    ctx: *mut c_void,
    context: c_int,
    mhandle: *mut c_void,
    rank: u32,
    request: *mut *mut c_void,
) -> NcclResult;
