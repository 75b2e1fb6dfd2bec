//! The entries that device code and an mlx5 device exchange: 64 bytes each, big-endian, in rings.
//!
//! Sources: linux-rdma/rdma-core, `providers/mlx5/mlx5dv.h` and `wqe.h`, and the headers of NCCL's vendored
//! doca_gpunetio, which device code is compiled with (`doca_gpunetio_verbs_def.h`, `doca_gpunetio_dev_verbs_qp.cuh`).

pub mod completion;
pub mod send;

/// Bytes of an entry of a send queue or a completion queue.
pub const ENTRY_BYTES: usize = 64;

/// Why an entry did not complete: what the device writes into the completion entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Syndrome {
    /// A length that the entry, the message or the operation cannot have.
    LocalLength = 0x01,
    /// The entry itself is none that this queue takes.
    LocalOperation = 0x02,
    /// A local key that names nothing, or a range outside of what it names.
    LocalProtection = 0x04,
    /// An entry before it ended the queue.
    Flushed = 0x05,
    /// The responder does not do that: an atomic operation on a word that is not aligned, or on a fabric without.
    RemoteInvalid = 0x12,
    /// A remote key that names nothing, or a range outside of what it names.
    RemoteAccess = 0x13,
    /// The peer does not answer.
    RetriesExceeded = 0x15,
}
