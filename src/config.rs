//! Every variable that oxygin honours, in one table.

use std::time::Duration;

/// `OXYGIN_FABRIC`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FabricChoice {
    /// Verbs where every rank can, else soft.
    Auto,
    /// Verbs or fail.
    Verbs,
    /// Soft.
    Soft,
}

/// What the environment says, read once at `init`.
#[derive(Clone, Debug)]
pub struct Config {
    /// `OXYGIN_FABRIC`.
    pub fabric: FabricChoice,
    /// `OXYGIN_TIMEOUT`: deadline of every collective step.
    pub timeout: Duration,
    /// `NCCL_SOCKET_IFNAME`, in NCCL's syntax.
    pub socket_ifname: Option<String>,
    /// `NCCL_SOCKET_FAMILY`: `libc::AF_INET`, `libc::AF_INET6`, or any.
    pub socket_family: Option<i32>,
    /// `OXYGIN_SOFT_TRANSPORT`: which ways the soft fabric may use towards other ranks.
    pub soft_transport: SoftTransport,
    /// `OXYGIN_TCP_STRIPES`: data connections to each peer, at least 1.
    pub tcp_stripes: u32,
    /// `NCCL_IB_HCA`, in NCCL's syntax.
    pub ib_hca: Option<String>,
    /// `NCCL_IB_GID_INDEX`.
    pub ib_gid_index: Option<u8>,
    /// `NCCL_IB_TC`.
    pub ib_tc: Option<u8>,
    /// `NCCL_IB_SL`.
    pub ib_sl: Option<u8>,
    /// `NCCL_IB_TIMEOUT`: 4.096 µs × 2^n.
    pub ib_timeout: u8,
    /// `NCCL_IB_RETRY_CNT`.
    pub ib_retry_cnt: u8,
    /// `NCCL_IB_PKEY`: index into the port's P_Key table.
    pub ib_pkey: u16,
    /// `NCCL_DMABUF_ENABLE`.
    pub dma_buf: bool,
}

/// `OXYGIN_SOFT_TRANSPORT`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SoftTransport {
    /// Shared memory where it works, else TCP.
    Auto,
    /// Shared memory without cross-memory attach, else TCP.
    NoCma,
    /// TCP to every peer but oneself.
    Tcp,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            fabric: FabricChoice::Auto,
            timeout: Duration::from_secs(120),
            socket_ifname: None,
            socket_family: None,
            soft_transport: SoftTransport::Auto,
            tcp_stripes: 1,
            ib_hca: None,
            ib_gid_index: None,
            ib_tc: None,
            ib_sl: None,
            // NCCL's own defaults.
            ib_timeout: 20,
            ib_retry_cnt: 7,
            ib_pkey: 0,
            dma_buf: true,
        }
    }
}
