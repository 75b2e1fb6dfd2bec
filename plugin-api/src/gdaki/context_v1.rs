//! The context up to NCCL 2.30.4, 72 bytes.
//!
//! Source: `ncclGinGdakiGPUContext` in `gin_gdaki_device_host_common.h` of 2.29.7 and 2.30.4; from 2.30.7 on
//! `ncclGinGdakiGPUContext_v1` in `gdaki/gpucontext/gpucontext_v1.h` of NCCL's sources, which writes it for kernels
//! compiled before 2.30.5 (`backendVersion` 1).

use super::table::BufferTable;

/// One context of the array behind `DeviceHandle::handle`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ContextV1 {
    /// By rank: a queue pair each, one behind the other; those that are not used are zero.
    pub gdqp: u64,
    /// The same of companions, which carry what increments counters; 0: the context has no counters.
    pub companion_gdqp: u64,
    /// Counters.
    pub counters_table: BufferTable,
    /// Signals.
    pub signals_table: BufferTable,
    /// Key to 8 bytes that take what atomic operations fetch, at address 0; big-endian.
    pub sink_buffer_lkey: u32,
}

const _: () = assert!(size_of::<ContextV1>() == 72 && core::mem::offset_of!(ContextV1, sink_buffer_lkey) == 64);
