//! The queue pair from NCCL 2.30.3 to 2.32.3, 296 bytes.
//!
//! Source: `doca_gpu_dev_verbs_qp` and `doca_gpu_dev_verbs_cq` in `doca_gpunetio_verbs_dev.h`. NCCL 2.31.2 put
//! `cq_type` into what was reserved before.

/// `DeviceHandle::net_device_version` that goes with it (`NCCL_GIN_GDAKI_VERSION`).
pub const VERSION: core::ffi::c_int = 200;

/// A completion queue.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompletionQueueV2 {
    /// The entries, 64 bytes each.
    pub cqe_daddr: u64,
    /// Its number, which wait entries name.
    pub cq_num: u32,
    /// Entries, a power of two.
    pub cqe_num: u32,
    /// Its doorbell record. NCCL's device code writes none.
    pub dbrec: u64,
    /// Completions seen. Device code's own.
    pub cqe_ci: u64,
    /// `cqe_num` - 1.
    pub cqe_mask: u32,
    /// Bytes of an entry: 64.
    pub cqe_size: u8,
    /// From 2.31.2 on how completions are seen: [`super::COMPLETION_RING`].
    pub cq_type: u8,
    /// Zero.
    pub reserved1: [u8; 2],
    /// Completions before the first one that device code waits for: entry `i` is at `i + cqe_rsvd`.
    pub cqe_rsvd: u64,
    /// [`super::MEMORY_GPU`].
    pub mem_type: u32,
    /// Zero.
    pub reserved2: [u8; 12],
}

/// A queue pair with its completion queue.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePairV2 {
    /// Slots that were ever reserved. Device code's own, as the next two.
    pub sq_rsvd_index: u64,
    /// Slots that are written.
    pub sq_ready_index: u64,
    /// Slots that the doorbell was rung for.
    pub sq_wqe_pi: u64,
    /// Its number, 24 bits.
    pub sq_num: u32,
    /// The number << 8.
    pub sq_num_shift8: u32,
    /// The same, big-endian.
    pub sq_num_shift8_be: u32,
    /// With 1 in its lowest bits, big-endian: the second word of an entry with as many segments of 16 bytes.
    pub sq_num_shift8_be_1ds: u32,
    /// With 2.
    pub sq_num_shift8_be_2ds: u32,
    /// With 3.
    pub sq_num_shift8_be_3ds: u32,
    /// With 4.
    pub sq_num_shift8_be_4ds: u32,
    /// With 5.
    pub sq_num_shift8_be_5ds: u32,
    /// Held while the doorbell is rung. Device code's own.
    pub sq_lock: i32,
    /// Slots, a power of two.
    pub sq_wqe_num: u16,
    /// `sq_wqe_num` - 1.
    pub sq_wqe_mask: u16,
    /// The slots, 64 bytes each.
    pub sq_wqe_daddr: u64,
    /// The send queue's doorbell record, 32 bits, big-endian.
    pub sq_dbrec: u64,
    /// What is rung: see `nic_handler`.
    pub sq_db: u64,
    /// Zero.
    pub reserved1: [u64; 1],
    /// Zero.
    pub reserved2: [u64; 8],
    /// Where completions of the send queue arrive.
    pub cq_sq: CompletionQueueV2,
    /// Zero.
    pub reserved3: [u64; 8],
    /// How entries are handed over: a `HANDLER_` constant of this module's parent.
    pub nic_handler: u32,
    /// [`super::MEMORY_GPU`].
    pub mem_type: u32,
}

const _: () = assert!(size_of::<CompletionQueueV2>() == 64 && size_of::<QueuePairV2>() == 296);
const _: () = assert!(core::mem::offset_of!(CompletionQueueV2, cq_type) == 37);
const _: () = assert!(core::mem::offset_of!(QueuePairV2, sq_wqe_daddr) == 64);
const _: () = assert!(core::mem::offset_of!(QueuePairV2, cq_sq) == 160);
const _: () = assert!(core::mem::offset_of!(QueuePairV2, nic_handler) == 288);
