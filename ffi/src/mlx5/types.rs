//! Types and values of `infiniband/mlx5dv.h` and `mlx5_api.h` (rdma-core), written by hand; `tests/mlx5_layout.rs`
//! compares them with what a C compiler makes of the headers.

use std::ffi::{c_int, c_void};

/// `MLX5DV_CONTEXT_FLAGS_DEVX`: the context takes DevX commands.
pub const MLX5DV_CONTEXT_FLAGS_DEVX: u32 = 1 << 0;
/// `MLX5DV_OBJ_AH`.
pub const MLX5DV_OBJ_AH: u64 = 1 << 5;
/// `MLX5DV_OBJ_PD`.
pub const MLX5DV_OBJ_PD: u64 = 1 << 6;
/// `MLX5DV_UAR_ALLOC_TYPE_NC`: a non-cached doorbell page, which all of a context share.
pub const MLX5DV_UAR_ALLOC_TYPE_NC: u32 = 1;
/// `MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED`: a non-cached doorbell page of one's own (rdma-core 45).
pub const MLX5DV_UAR_ALLOC_TYPE_NC_DEDICATED: u32 = 1 << 31;
/// `MLX5DV_UMEM_MASK_DMABUF`: `dmabuf_fd` counts, and `addr` is an offset into it.
pub const MLX5DV_UMEM_MASK_DMABUF: u64 = 1 << 0;
/// `MLX5DV_DEVX_CREATE_EVENT_CHANNEL_FLAGS_OMIT_EV_DATA`: events are cookies alone.
pub const MLX5DV_DEVX_CREATE_EVENT_CHANNEL_FLAGS_OMIT_EV_DATA: u32 = 1 << 0;
/// `MLX5DV_REG_DMABUF_ACCESS_DATA_DIRECT`: the device reaches the memory by its Data Direct function.
pub const MLX5DV_REG_DMABUF_ACCESS_DATA_DIRECT: c_int = 1 << 0;

/// `struct mlx5dv_context_attr`, as far as every version has it: what newer ones have behind it counts only if
/// `comp_mask` says so.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct mlx5dv_context_attr {
    /// `MLX5DV_CONTEXT_FLAGS_*`.
    pub flags: u32,
    /// 0.
    pub comp_mask: u64,
}

/// A pair of `struct mlx5dv_obj`: what is asked about, and where the answer goes.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Pair {
    /// The object.
    pub input: *mut c_void,
    /// The answer.
    pub output: *mut c_void,
}

impl Pair {
    /// Nothing is asked.
    pub const NONE: Self = Self { input: std::ptr::null_mut(), output: std::ptr::null_mut() };
}

/// `struct mlx5dv_obj`, as far as every version has it: of further pairs only those count that are asked for.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct mlx5dv_obj {
    /// Unused.
    pub qp: Pair,
    /// Unused.
    pub cq: Pair,
    /// Unused.
    pub srq: Pair,
    /// Unused.
    pub rwq: Pair,
    /// Unused.
    pub dm: Pair,
    /// An `ibv_ah`, and an [`mlx5dv_ah`].
    pub ah: Pair,
    /// An `ibv_pd`, and an [`mlx5dv_pd`].
    pub pd: Pair,
}

/// `struct mlx5dv_pd`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct mlx5dv_pd {
    /// The protection domain's number.
    pub pdn: u32,
    /// 0.
    pub comp_mask: u64,
}

/// `struct mlx5dv_ah`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct mlx5dv_ah {
    /// The address vector, which lives as long as the address handle.
    pub av: *const mlx5_wqe_av,
    /// 0.
    pub comp_mask: u64,
}

/// `struct mlx5_wqe_av`, all in network byte order.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct mlx5_wqe_av {
    /// Unused.
    pub key: u64,
    /// Unused.
    pub dqp_dct: u32,
    /// Unused.
    pub stat_rate_sl: u8,
    /// Unused.
    pub fl_mlid: u8,
    /// Unused.
    pub rlid: u16,
    /// Unused.
    pub reserved0: [u8; 4],
    /// The MAC address of the next hop, on Ethernet.
    pub rmac: [u8; 6],
    /// Unused.
    pub tclass: u8,
    /// Unused.
    pub hop_limit: u8,
    /// Unused.
    pub grh_gid_fl: u32,
    /// Unused.
    pub rgid: [u8; 16],
}

/// `struct mlx5dv_devx_uar`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct mlx5dv_devx_uar {
    /// The doorbell register.
    pub reg_addr: *mut c_void,
    /// The page that it is in.
    pub base_addr: *mut c_void,
    /// The page's number, for queues.
    pub page_id: u32,
    /// Unused.
    pub mmap_off: libc::off_t,
    /// 0.
    pub comp_mask: u64,
}

/// `struct mlx5dv_devx_umem`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct mlx5dv_devx_umem {
    /// Its number, for queues.
    pub umem_id: u32,
}

/// `struct mlx5dv_devx_umem_in`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct mlx5dv_devx_umem_in {
    /// First byte, or its offset in the DMA-BUF.
    pub addr: *mut c_void,
    /// Bytes.
    pub size: usize,
    /// `IBV_ACCESS_*`.
    pub access: u32,
    /// Sizes of pages that will do, as bits.
    pub pgsz_bitmap: u64,
    /// `MLX5DV_UMEM_MASK_*`.
    pub comp_mask: u64,
    /// The DMA-BUF.
    pub dmabuf_fd: c_int,
}

/// `struct mlx5dv_devx_event_channel`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct mlx5dv_devx_event_channel {
    /// Readable when there is an event.
    pub fd: c_int,
}

/// `struct mlx5dv_devx_async_event_hdr`, of events without data.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct mlx5dv_devx_async_event_hdr {
    /// What was said when the event was subscribed to.
    pub cookie: u64,
}

/// `struct mlx5dv_devx_obj`: only pointed to.
#[repr(C)]
pub struct mlx5dv_devx_obj {
    _private: [u8; 0],
}
