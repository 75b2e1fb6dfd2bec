//! What device code of NCCL's GDAKI backend reads: contexts, and everything that these point to. One file a layout;
//! what several versions read alike is in one file.
//!
//! | NCCL | context | queue pair | window, table |
//! |---|---|---|---|
//! | 2.29.7 | [`context_v1`], 72 bytes | [`queue_pair_v1`], 280 bytes | [`window`], [`table`] |
//! | 2.30.3, 2.30.4 | [`context_v1`] | [`queue_pair_v2`], 296 bytes | the same |
//! | 2.30.7, 2.31.2, 2.32.3 | [`context_v2`], 88 bytes | [`queue_pair_v2`] | the same |
//!
//! Addresses are those that the GPU uses. Fields of 32 bits that a work queue entry takes over as they are, keys among
//! them, are big-endian. `tests/gdaki.rs` compares every field with what a C++ compiler finds in NCCL's headers.
//!
//! Sources, as the wheels `nvidia-nccl-cu12` carry them below `include/nccl_device/gin/gdaki/`:
//! `gin_gdaki_device_host_common.h`, and `doca_gpunetio_verbs_dev.h` and `doca_gpunetio_verbs_def.h` of
//! `doca_gpunetio/common/`.

pub mod context_v1;
pub mod context_v2;
pub mod queue_pair_v1;
pub mod queue_pair_v2;
pub mod table;
pub mod window;

/// `nic_handler`: device code stores the producer index, 64 bits in the host's order, in `*sq_db`
/// (`…_NIC_HANDLER_CPU_PROXY`). All versions.
pub const HANDLER_CPU_PROXY: u32 = 1;
/// `nic_handler`: device code writes the doorbell, the doorbell record and the doorbell again
/// (`…_NIC_HANDLER_GPU_SM_DB`). All versions.
pub const HANDLER_GPU_DOORBELL: u32 = 2;
/// `nic_handler`: device code writes the doorbell alone (`…_NIC_HANDLER_GPU_SM_NO_DBR`). All versions.
pub const HANDLER_GPU_NO_RECORD: u32 = 10;
/// `nic_handler`: `sq_db` is an array of 64 bits a slot, in which device code stores an entry's index + 1 once the
/// entry is written, in any order (`…_NIC_HANDLER_CPU_PROXY_FREE_FLOW`). Device code compiled with 2.31.2 and newer.
pub const HANDLER_FREE_FLOW: u32 = 17;

/// `mem_type`: what NCCL's own host code writes (`DOCA_GPUNETIO_VERBS_MEM_TYPE_GPU`); device code asserts it in debug
/// builds.
pub const MEMORY_GPU: u32 = 2;

/// `cq_type`: a ring of 64-byte entries (`DOCA_GPUNETIO_VERBS_CQ_64B`), the only one that device code older than
/// 2.31.2 knows.
pub const COMPLETION_RING: u8 = 0;

/// `cq_type`: no entries; device code waits until `cqe_ci`, which others count up, is beyond an entry's index, and sees
/// no errors (`DOCA_GPUNETIO_VERBS_CQ_64B_COLLAPSED_HOST`). Device code compiled with 2.31.2 and newer.
pub const COMPLETION_COUNTED: u8 = 3;
