//! What proxy device code is given: an array of these structures, one a context, behind `DeviceHandle::handle`. Its
//! element size follows the NCCL version that the device code was compiled with.
//!
//! Source: `gin_proxy_device_host_common.h` and `proxy_gpucontext/` of NCCL 2.29.7 to 2.32.3.

/// Version of the proxy interface, for `DeviceHandle::net_device_version` (`NCCL_GIN_PROXY_VERSION`).
pub const PROXY_VERSION: core::ffi::c_int = 100;

/// A context up to NCCL 2.30.4. Device code computes slot `i` of a peer's queue as
/// `queues + (peer * queue_size + i % queue_size) * size of a descriptor`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextV1 {
    /// Ranks.
    pub nranks: i32,
    /// Slots of each peer's queue, a power of two.
    pub queue_size: u32,
    /// The queues, one behind the other.
    pub queues: u64,
    /// By peer: descriptors that device code has begun. Device code's own.
    pub pis: u64,
    /// By peer: descriptors that are complete, 32 bits each, in order.
    pub cis: u64,
    /// 64 bits each.
    pub counters: u64,
    /// 64 bits each.
    pub signals: u64,
}

/// A context from NCCL 2.30.7 to 2.31.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextV2 {
    /// What it had before.
    pub v1: ContextV1,
    /// 64 bits a signal: device code subtracts these, and resets a signal by setting its own.
    pub signal_offsets: u64,
    /// By peer: the newest get, 32 bits. Device code's own.
    pub last_issued_get: u64,
    /// By peer: the newest get known to be visible, 32 bits. Device code's own.
    pub last_visible_get: u64,
}

/// A context of NCCL 2.32.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ContextV3 {
    /// What it had before.
    pub v2: ContextV2,
    /// A visible signal implies every put received before it, from any peer.
    pub flushes_all_puts_on_any_signal: bool,
}
