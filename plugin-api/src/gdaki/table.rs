//! A table of counters or signals, as a context has it. NCCL 2.29.7 to 2.32.3.
//!
//! Source: `ncclGinGdakiGlobalGPUBufferTable` in `gin_gdaki_device_host_common.h`.

/// The counters or signals of one context, which are a part of one registered region.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BufferTable {
    /// The context's first word, 64 bits each: where this rank's device code reads and resets them.
    pub buffer: u64,
    /// By rank: the key to that rank's region, 32 bits each, big-endian.
    pub rkeys: u64,
    /// The key to this rank's region, big-endian.
    pub lkey: u32,
    /// Words before the context's first one in the region. Device code addresses word `i` of a peer as
    /// `8 * (i + offset)` with that peer's key.
    pub offset: u32,
}

const _: () = assert!(size_of::<BufferTable>() == 24);
