//! The context from NCCL 2.30.7 to 2.32.3, 88 bytes.
//!
//! Source: `ncclGinGdakiGPUContext` in `gin_gdaki_device_host_common.h`. NCCL 2.32 put `use_mcst` into what was padding
//! before, under the same `backendVersion` (2): device code of 2.30.7 and 2.31.2 does not read it.

use super::table::BufferTable;

/// One context of the array behind `DeviceHandle::handle`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContextV2 {
    /// By rank: a queue pair each, one behind the other; those that are not used are zero.
    pub gdqp: u64,
    /// The same of companions, which carry what increments counters; 0: the context has no counters.
    pub companion_gdqp: u64,
    /// Counters.
    pub counters_table: BufferTable,
    /// Signals.
    pub signals_table: BufferTable,
    /// Key to 8 bytes that take what atomic operations fetch and dumps read, at address 0; big-endian.
    pub sink_buffer_lkey: u32,
    /// A flush behind gets posts a dump. Device code before 2.32 does so whatever stands here.
    pub use_mcst: bool,
    /// By rank, 64 bits each: 1 + the index of the newest get's entry. Device code's own, 0 at first.
    pub last_issued_get: u64,
    /// By rank, 64 bits each: 1 + the index of the newest dump's entry. Device code's own, 0 at first.
    pub last_visible_get: u64,
}

const _: () = assert!(size_of::<ContextV2>() == 88);
const _: () = assert!(core::mem::offset_of!(ContextV2, use_mcst) == 68);
const _: () = assert!(core::mem::offset_of!(ContextV2, last_issued_get) == 72);
