//! The stable part of the libibverbs ABI that oxygin uses, as `#[repr(C)]` types.
//!
//! Field order and values are those of `infiniband/verbs.h`; `tests/verbs_layout.rs` compares sizes, offsets and
//! values with what a C compiler makes of that header. C enums are plain integers here: a value that this file does
//! not know must not be undefined behaviour.

use std::ffi::{c_char, c_int, c_uint, c_void};

/// An RDMA device, owned by libibverbs.
#[repr(C)]
pub struct ibv_device {
    /// Obsolete.
    pub ops: [*mut c_void; 2],
    /// `IBV_NODE_*`.
    pub node_type: c_int,
    /// `IBV_TRANSPORT_*`.
    pub transport_type: c_int,
    /// Kernel name, for example `mlx5_0`.
    pub name: [c_char; 64],
    /// Name of the uverbs character device.
    pub dev_name: [c_char; 64],
    /// Path of the uverbs device in sysfs.
    pub dev_path: [c_char; 256],
    /// Path of the device in sysfs.
    pub ibdev_path: [c_char; 256],
}

/// `IBV_NODE_RNIC`: an iWARP device.
pub const IBV_NODE_RNIC: c_int = 4;
/// `IBV_TRANSPORT_IB`: InfiniBand and RoCE.
pub const IBV_TRANSPORT_IB: c_int = 0;
/// `IBV_TRANSPORT_IWARP`.
pub const IBV_TRANSPORT_IWARP: c_int = 1;

/// `poll_cq` of a context.
pub type PollCq = unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int;
/// `req_notify_cq` of a context.
pub type ReqNotifyCq = unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int;
/// `post_send` of a context.
pub type PostSend = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int;
/// `post_recv` of a context.
pub type PostRecv = unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int;

/// The data path of a device: what the inline functions of `verbs.h` call.
#[repr(C)]
pub struct ibv_context_ops {
    /// Compatibility entries and memory windows.
    pub head: [*mut c_void; 11],
    /// Takes completions.
    pub poll_cq: Option<PollCq>,
    /// Arms the completion channel.
    pub req_notify_cq: Option<ReqNotifyCq>,
    /// Compatibility entries and shared receive queues.
    pub middle: [*mut c_void; 12],
    /// Posts send work requests.
    pub post_send: Option<PostSend>,
    /// Posts receive work requests.
    pub post_recv: Option<PostRecv>,
    /// Compatibility entries.
    pub tail: [*mut c_void; 5],
}

/// An open device.
#[repr(C)]
pub struct ibv_context {
    /// The device.
    pub device: *mut ibv_device,
    /// Its data path.
    pub ops: ibv_context_ops,
    /// Command descriptor.
    pub cmd_fd: c_int,
    /// Readable when an asynchronous event waits.
    pub async_fd: c_int,
    /// Completion vectors.
    pub num_comp_vectors: c_int,
    /// libibverbs' own.
    pub mutex: libc::pthread_mutex_t,
    /// All ones where the extended table lies in front of this one.
    pub abi_compat: *mut c_void,
}

/// Options of a connection that devices agree on beyond what the standard has ("enhanced connection establishment").
#[repr(C)]
#[derive(Clone, Copy, Default, Debug, PartialEq, Eq)]
pub struct ibv_ece {
    /// PCI vendor whose options they are.
    pub vendor_id: u32,
    /// The vendor's affair.
    pub options: u32,
    /// Which fields more there are: none yet.
    pub comp_mask: u32,
}

/// An asynchronous event of a device.
#[repr(C)]
#[derive(Clone, Copy, Default, Debug)]
pub struct ibv_async_event {
    /// What it is about: a pointer to an object, or, in the first four bytes, a port; which one, the type tells.
    pub element: u64,
    /// `IBV_EVENT_*`.
    pub event_type: c_uint,
}

/// `IBV_EVENT_CQ_ERR`: a completion queue overran, or failed.
pub const IBV_EVENT_CQ_ERR: c_uint = 0;
/// `IBV_EVENT_QP_FATAL`: a queue pair failed, and may not be able to say so by completions.
pub const IBV_EVENT_QP_FATAL: c_uint = 1;
/// `IBV_EVENT_QP_REQ_ERR`: a queue pair refused a malformed request of its peer.
pub const IBV_EVENT_QP_REQ_ERR: c_uint = 2;
/// `IBV_EVENT_QP_ACCESS_ERR`: a queue pair refused its peer's address or key.
pub const IBV_EVENT_QP_ACCESS_ERR: c_uint = 3;
/// `IBV_EVENT_DEVICE_FATAL`: the device failed, or is taken away.
pub const IBV_EVENT_DEVICE_FATAL: c_uint = 8;
/// `IBV_EVENT_PORT_ACTIVE`: a port can be used again.
pub const IBV_EVENT_PORT_ACTIVE: c_uint = 9;
/// `IBV_EVENT_PORT_ERR`: a port went down.
pub const IBV_EVENT_PORT_ERR: c_uint = 10;
/// `IBV_EVENT_LID_CHANGE`: a port has another LID.
pub const IBV_EVENT_LID_CHANGE: c_uint = 11;
/// `IBV_EVENT_GID_CHANGE`: a port's GID table is another.
pub const IBV_EVENT_GID_CHANGE: c_uint = 18;

/// A protection domain.
#[repr(C)]
pub struct ibv_pd {
    /// Its device.
    pub context: *mut ibv_context,
    /// Kernel handle.
    pub handle: u32,
}

/// A memory region.
#[repr(C)]
pub struct ibv_mr {
    /// Its device.
    pub context: *mut ibv_context,
    /// Its protection domain.
    pub pd: *mut ibv_pd,
    /// First byte.
    pub addr: *mut c_void,
    /// Bytes.
    pub length: usize,
    /// Kernel handle.
    pub handle: u32,
    /// Local key.
    pub lkey: u32,
    /// Remote key.
    pub rkey: u32,
}

/// A completion channel.
#[repr(C)]
pub struct ibv_comp_channel {
    /// Its device.
    pub context: *mut ibv_context,
    /// Readable when a completion event waits.
    pub fd: c_int,
    /// Completion queues on it.
    pub refcnt: c_int,
}

/// A completion queue.
#[repr(C)]
pub struct ibv_cq {
    /// Its device.
    pub context: *mut ibv_context,
    /// Its channel or NULL.
    pub channel: *mut ibv_comp_channel,
    /// The creator's pointer.
    pub cq_context: *mut c_void,
    /// Kernel handle.
    pub handle: u32,
    /// Entries.
    pub cqe: c_int,
    /// libibverbs' own.
    pub mutex: libc::pthread_mutex_t,
    /// libibverbs' own.
    pub cond: libc::pthread_cond_t,
    /// libibverbs' own.
    pub comp_events_completed: u32,
    /// libibverbs' own.
    pub async_events_completed: u32,
}

/// A queue pair.
#[repr(C)]
pub struct ibv_qp {
    /// Its device.
    pub context: *mut ibv_context,
    /// The creator's pointer.
    pub qp_context: *mut c_void,
    /// Its protection domain.
    pub pd: *mut ibv_pd,
    /// Completions of sends.
    pub send_cq: *mut ibv_cq,
    /// Completions of receives.
    pub recv_cq: *mut ibv_cq,
    /// Shared receive queue or NULL.
    pub srq: *mut c_void,
    /// Kernel handle.
    pub handle: u32,
    /// Number on the wire, 24 bits.
    pub qp_num: u32,
    /// `IBV_QPS_*` as libibverbs last set it.
    pub state: c_uint,
    /// `IBV_QPT_*`.
    pub qp_type: c_uint,
    /// libibverbs' own.
    pub mutex: libc::pthread_mutex_t,
    /// libibverbs' own.
    pub cond: libc::pthread_cond_t,
    /// libibverbs' own.
    pub events_completed: u32,
}

/// A global identifier, network byte order.
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ibv_gid {
    /// The 16 bytes.
    pub raw: [u8; 16],
}

/// One entry of a port's GID table.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_gid_entry {
    /// The identifier.
    pub gid: ibv_gid,
    /// Its index.
    pub gid_index: u32,
    /// Its port.
    pub port_num: u32,
    /// `IBV_GID_TYPE_*`.
    pub gid_type: u32,
    /// Network interface, 0 for none.
    pub ndev_ifindex: u32,
}

/// `IBV_GID_TYPE_IB`.
pub const IBV_GID_TYPE_IB: u32 = 0;
/// `IBV_GID_TYPE_ROCE_V1`.
pub const IBV_GID_TYPE_ROCE_V1: u32 = 1;
/// `IBV_GID_TYPE_ROCE_V2`.
pub const IBV_GID_TYPE_ROCE_V2: u32 = 2;

/// What a device can do.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_device_attr {
    /// Firmware version.
    pub fw_ver: [c_char; 64],
    /// Node GUID, network byte order.
    pub node_guid: u64,
    /// System image GUID, network byte order.
    pub sys_image_guid: u64,
    /// Largest region in bytes.
    pub max_mr_size: u64,
    /// Page sizes.
    pub page_size_cap: u64,
    /// Vendor.
    pub vendor_id: u32,
    /// Part.
    pub vendor_part_id: u32,
    /// Revision.
    pub hw_ver: u32,
    /// Queue pairs.
    pub max_qp: c_int,
    /// Work requests a queue.
    pub max_qp_wr: c_int,
    /// `IBV_DEVICE_*`.
    pub device_cap_flags: c_uint,
    /// Pieces a work request.
    pub max_sge: c_int,
    /// Pieces a read.
    pub max_sge_rd: c_int,
    /// Completion queues.
    pub max_cq: c_int,
    /// Entries a completion queue.
    pub max_cqe: c_int,
    /// Regions.
    pub max_mr: c_int,
    /// Protection domains.
    pub max_pd: c_int,
    /// Reads and atomics a queue pair may have arriving.
    pub max_qp_rd_atom: c_int,
    /// Unused.
    pub max_ee_rd_atom: c_int,
    /// The same for the whole device.
    pub max_res_rd_atom: c_int,
    /// Reads and atomics a queue pair may have under way.
    pub max_qp_init_rd_atom: c_int,
    /// Unused.
    pub max_ee_init_rd_atom: c_int,
    /// `IBV_ATOMIC_*`.
    pub atomic_cap: c_uint,
    /// Unused here, as all that follows up to the ports.
    pub max_ee: c_int,
    /// Unused.
    pub max_rdd: c_int,
    /// Unused.
    pub max_mw: c_int,
    /// Unused.
    pub max_raw_ipv6_qp: c_int,
    /// Unused.
    pub max_raw_ethy_qp: c_int,
    /// Unused.
    pub max_mcast_grp: c_int,
    /// Unused.
    pub max_mcast_qp_attach: c_int,
    /// Unused.
    pub max_total_mcast_qp_attach: c_int,
    /// Unused.
    pub max_ah: c_int,
    /// Unused.
    pub max_fmr: c_int,
    /// Unused.
    pub max_map_per_fmr: c_int,
    /// Unused.
    pub max_srq: c_int,
    /// Unused.
    pub max_srq_wr: c_int,
    /// Unused.
    pub max_srq_sge: c_int,
    /// P_Keys.
    pub max_pkeys: u16,
    /// Unused.
    pub local_ca_ack_delay: u8,
    /// Ports, numbered from 1.
    pub phys_port_cnt: u8,
}

/// `IBV_ATOMIC_NONE`.
pub const IBV_ATOMIC_NONE: c_uint = 0;
/// `IBV_ATOMIC_HCA`: atomic among the operations of one device.
pub const IBV_ATOMIC_HCA: c_uint = 1;
/// `IBV_ATOMIC_GLOB`: atomic with the processor too.
pub const IBV_ATOMIC_GLOB: c_uint = 2;

/// The state of a port. The library's own entry point writes only up to `flags`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_port_attr {
    /// `IBV_PORT_*`.
    pub state: c_uint,
    /// `IBV_MTU_*`.
    pub max_mtu: c_uint,
    /// `IBV_MTU_*`.
    pub active_mtu: c_uint,
    /// Entries of the GID table.
    pub gid_tbl_len: c_int,
    /// Capabilities.
    pub port_cap_flags: u32,
    /// Largest message in bytes.
    pub max_msg_sz: u32,
    /// Counter.
    pub bad_pkey_cntr: u32,
    /// Counter.
    pub qkey_viol_cntr: u32,
    /// Entries of the P_Key table.
    pub pkey_tbl_len: u16,
    /// Local identifier; 0 on Ethernet.
    pub lid: u16,
    /// The subnet manager's.
    pub sm_lid: u16,
    /// Mask.
    pub lmc: u8,
    /// Virtual lanes.
    pub max_vl_num: u8,
    /// The subnet manager's service level.
    pub sm_sl: u8,
    /// Subnet timeout.
    pub subnet_timeout: u8,
    /// Unused.
    pub init_type_reply: u8,
    /// Lanes, one bit.
    pub active_width: u8,
    /// Speed of a lane, one bit.
    pub active_speed: u8,
    /// Physical state.
    pub phys_state: u8,
    /// `IBV_LINK_LAYER_*`.
    pub link_layer: u8,
    /// `IBV_QPF_*`.
    pub flags: u8,
    /// More capabilities.
    pub port_cap_flags2: u16,
}

/// `IBV_PORT_ACTIVE`.
pub const IBV_PORT_ACTIVE: c_uint = 4;
/// `IBV_LINK_LAYER_INFINIBAND`.
pub const IBV_LINK_LAYER_INFINIBAND: u8 = 1;
/// `IBV_LINK_LAYER_ETHERNET`.
pub const IBV_LINK_LAYER_ETHERNET: u8 = 2;
/// `IBV_QPF_GRH_REQUIRED`: every packet needs a global route header.
pub const IBV_QPF_GRH_REQUIRED: u8 = 1;
/// `IBV_MTU_256`; each next value doubles it.
pub const IBV_MTU_256: c_uint = 1;
/// `IBV_MTU_4096`.
pub const IBV_MTU_4096: c_uint = 5;

/// Room of a queue pair.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_qp_cap {
    /// Send work requests.
    pub max_send_wr: u32,
    /// Receive work requests.
    pub max_recv_wr: u32,
    /// Pieces a send.
    pub max_send_sge: u32,
    /// Pieces a receive.
    pub max_recv_sge: u32,
    /// Bytes that may travel inside a work request.
    pub max_inline_data: u32,
}

/// What a queue pair is made from.
#[repr(C)]
pub struct ibv_qp_init_attr {
    /// The creator's pointer.
    pub qp_context: *mut c_void,
    /// Completions of sends.
    pub send_cq: *mut ibv_cq,
    /// Completions of receives.
    pub recv_cq: *mut ibv_cq,
    /// Shared receive queue or NULL.
    pub srq: *mut c_void,
    /// Room; on return what it really has.
    pub cap: ibv_qp_cap,
    /// `IBV_QPT_*`.
    pub qp_type: c_uint,
    /// Whether every send completes.
    pub sq_sig_all: c_int,
}

/// `IBV_QPT_RC`: reliable connection.
pub const IBV_QPT_RC: c_uint = 2;

/// A route to a port in another subnet, or any port on Ethernet.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_global_route {
    /// Destination.
    pub dgid: ibv_gid,
    /// Flow label.
    pub flow_label: u32,
    /// Index of the own GID.
    pub sgid_index: u8,
    /// Hops.
    pub hop_limit: u8,
    /// Traffic class.
    pub traffic_class: u8,
}

/// An address.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_ah_attr {
    /// Global part.
    pub grh: ibv_global_route,
    /// Destination local identifier.
    pub dlid: u16,
    /// Service level.
    pub sl: u8,
    /// Path bits.
    pub src_path_bits: u8,
    /// Rate limit.
    pub static_rate: u8,
    /// Whether the global part counts.
    pub is_global: u8,
    /// Own port.
    pub port_num: u8,
}

/// What `modify_qp` sets; the mask says which fields count.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_qp_attr {
    /// `IBV_QPS_*`.
    pub qp_state: c_uint,
    /// Assumed current state.
    pub cur_qp_state: c_uint,
    /// `IBV_MTU_*`.
    pub path_mtu: c_uint,
    /// Unused.
    pub path_mig_state: c_uint,
    /// Unused.
    pub qkey: u32,
    /// First packet number expected.
    pub rq_psn: u32,
    /// First packet number sent.
    pub sq_psn: u32,
    /// The peer's number.
    pub dest_qp_num: u32,
    /// What the peer may do.
    pub qp_access_flags: c_uint,
    /// Room.
    pub cap: ibv_qp_cap,
    /// The way to the peer.
    pub ah_attr: ibv_ah_attr,
    /// Unused.
    pub alt_ah_attr: ibv_ah_attr,
    /// Index of the P_Key.
    pub pkey_index: u16,
    /// Unused.
    pub alt_pkey_index: u16,
    /// Unused.
    pub en_sqd_async_notify: u8,
    /// Unused.
    pub sq_draining: u8,
    /// Reads and atomics under way at most.
    pub max_rd_atomic: u8,
    /// Reads and atomics arriving at most.
    pub max_dest_rd_atomic: u8,
    /// Wait that a receiver without a receive asks for.
    pub min_rnr_timer: u8,
    /// Own port.
    pub port_num: u8,
    /// 4.096 µs × 2^n.
    pub timeout: u8,
    /// Retries after a timeout.
    pub retry_cnt: u8,
    /// Retries while the receiver is not ready; 7: for ever.
    pub rnr_retry: u8,
    /// Unused.
    pub alt_port_num: u8,
    /// Unused.
    pub alt_timeout: u8,
    /// Unused.
    pub rate_limit: u32,
}

/// `IBV_QPS_RESET`.
pub const IBV_QPS_RESET: c_uint = 0;
/// `IBV_QPS_INIT`.
pub const IBV_QPS_INIT: c_uint = 1;
/// `IBV_QPS_RTR`: ready to receive.
pub const IBV_QPS_RTR: c_uint = 2;
/// `IBV_QPS_RTS`: ready to send.
pub const IBV_QPS_RTS: c_uint = 3;
/// `IBV_QPS_ERR`.
pub const IBV_QPS_ERR: c_uint = 6;

/// `IBV_QP_STATE`.
pub const IBV_QP_STATE: c_int = 1 << 0;
/// `IBV_QP_ACCESS_FLAGS`.
pub const IBV_QP_ACCESS_FLAGS: c_int = 1 << 3;
/// `IBV_QP_PKEY_INDEX`.
pub const IBV_QP_PKEY_INDEX: c_int = 1 << 4;
/// `IBV_QP_PORT`.
pub const IBV_QP_PORT: c_int = 1 << 5;
/// `IBV_QP_AV`.
pub const IBV_QP_AV: c_int = 1 << 7;
/// `IBV_QP_PATH_MTU`.
pub const IBV_QP_PATH_MTU: c_int = 1 << 8;
/// `IBV_QP_TIMEOUT`.
pub const IBV_QP_TIMEOUT: c_int = 1 << 9;
/// `IBV_QP_RETRY_CNT`.
pub const IBV_QP_RETRY_CNT: c_int = 1 << 10;
/// `IBV_QP_RNR_RETRY`.
pub const IBV_QP_RNR_RETRY: c_int = 1 << 11;
/// `IBV_QP_RQ_PSN`.
pub const IBV_QP_RQ_PSN: c_int = 1 << 12;
/// `IBV_QP_MAX_QP_RD_ATOMIC`.
pub const IBV_QP_MAX_QP_RD_ATOMIC: c_int = 1 << 13;
/// `IBV_QP_MIN_RNR_TIMER`.
pub const IBV_QP_MIN_RNR_TIMER: c_int = 1 << 15;
/// `IBV_QP_SQ_PSN`.
pub const IBV_QP_SQ_PSN: c_int = 1 << 16;
/// `IBV_QP_MAX_DEST_RD_ATOMIC`.
pub const IBV_QP_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
/// `IBV_QP_DEST_QPN`.
pub const IBV_QP_DEST_QPN: c_int = 1 << 20;

/// `IBV_ACCESS_LOCAL_WRITE`.
pub const IBV_ACCESS_LOCAL_WRITE: c_uint = 1;
/// `IBV_ACCESS_REMOTE_WRITE`.
pub const IBV_ACCESS_REMOTE_WRITE: c_uint = 1 << 1;
/// `IBV_ACCESS_REMOTE_READ`.
pub const IBV_ACCESS_REMOTE_READ: c_uint = 1 << 2;
/// `IBV_ACCESS_REMOTE_ATOMIC`.
pub const IBV_ACCESS_REMOTE_ATOMIC: c_uint = 1 << 3;
/// `IBV_ACCESS_RELAXED_ORDERING`: optional, libibverbs drops it where the kernel does not know it.
pub const IBV_ACCESS_RELAXED_ORDERING: c_uint = 1 << 20;

/// A piece of local memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_sge {
    /// First byte.
    pub addr: u64,
    /// Bytes.
    pub length: u32,
    /// Local key.
    pub lkey: u32,
}

/// Remote part of a write or read.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_wr_rdma {
    /// First byte.
    pub remote_addr: u64,
    /// Remote key.
    pub rkey: u32,
}

/// Remote part of an atomic.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_wr_atomic {
    /// The 8-byte-aligned word.
    pub remote_addr: u64,
    /// What to add.
    pub compare_add: u64,
    /// Unused by fetch-and-add.
    pub swap: u64,
    /// Remote key.
    pub rkey: u32,
}

/// Remote part of a send work request.
#[repr(C)]
#[derive(Clone, Copy)]
pub union ibv_wr_remote {
    /// Write or read.
    pub rdma: ibv_wr_rdma,
    /// Atomic.
    pub atomic: ibv_wr_atomic,
}

/// A send work request.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_send_wr {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// The next of a chain or NULL.
    pub next: *mut ibv_send_wr,
    /// Local pieces.
    pub sg_list: *mut ibv_sge,
    /// How many.
    pub num_sge: c_int,
    /// `IBV_WR_*`.
    pub opcode: c_uint,
    /// `IBV_SEND_*`.
    pub send_flags: c_uint,
    /// Immediate data, network byte order.
    pub imm_data: u32,
    /// Remote part.
    pub wr: ibv_wr_remote,
    /// Extended connections; unused.
    pub qp_type: u64,
    /// Memory windows and segmentation; unused.
    pub rest: [u64; 6],
}

/// `IBV_WR_RDMA_WRITE`.
pub const IBV_WR_RDMA_WRITE: c_uint = 0;
/// `IBV_WR_SEND`.
pub const IBV_WR_SEND: c_uint = 2;
/// `IBV_WR_RDMA_READ`.
pub const IBV_WR_RDMA_READ: c_uint = 4;
/// `IBV_WR_ATOMIC_CMP_AND_SWP`.
pub const IBV_WR_ATOMIC_CMP_AND_SWP: c_uint = 5;
/// `IBV_WR_ATOMIC_FETCH_AND_ADD`.
pub const IBV_WR_ATOMIC_FETCH_AND_ADD: c_uint = 6;
/// `IBV_SEND_FENCE`: starts when all reads posted before it are complete.
pub const IBV_SEND_FENCE: c_uint = 1 << 0;
/// `IBV_SEND_SIGNALED`.
pub const IBV_SEND_SIGNALED: c_uint = 1 << 1;
/// `IBV_SEND_SOLICITED`.
pub const IBV_SEND_SOLICITED: c_uint = 1 << 2;
/// `IBV_SEND_INLINE`.
pub const IBV_SEND_INLINE: c_uint = 1 << 3;

/// A receive work request.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_recv_wr {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// The next of a chain or NULL.
    pub next: *mut ibv_recv_wr,
    /// Local pieces.
    pub sg_list: *mut ibv_sge,
    /// How many.
    pub num_sge: c_int,
}

/// A completion. On an error only `wr_id`, `status`, `qp_num` and `vendor_err` count.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_wc {
    /// What the work request carried.
    pub wr_id: u64,
    /// `IBV_WC_*`.
    pub status: c_uint,
    /// What completed.
    pub opcode: c_uint,
    /// The vendor's reason.
    pub vendor_err: u32,
    /// Bytes received.
    pub byte_len: u32,
    /// Immediate data, network byte order.
    pub imm_data: u32,
    /// Queue pair.
    pub qp_num: u32,
    /// Unused.
    pub src_qp: u32,
    /// Flags.
    pub wc_flags: c_uint,
    /// Unused.
    pub pkey_index: u16,
    /// Unused.
    pub slid: u16,
    /// Unused.
    pub sl: u8,
    /// Unused.
    pub dlid_path_bits: u8,
}

/// `IBV_WC_SUCCESS`.
pub const IBV_WC_SUCCESS: c_uint = 0;
/// `IBV_WC_LOC_LEN_ERR`.
pub const IBV_WC_LOC_LEN_ERR: c_uint = 1;
/// `IBV_WC_LOC_QP_OP_ERR`.
pub const IBV_WC_LOC_QP_OP_ERR: c_uint = 2;
/// `IBV_WC_LOC_PROT_ERR`.
pub const IBV_WC_LOC_PROT_ERR: c_uint = 4;
/// `IBV_WC_WR_FLUSH_ERR`.
pub const IBV_WC_WR_FLUSH_ERR: c_uint = 5;
/// `IBV_WC_LOC_ACCESS_ERR`.
pub const IBV_WC_LOC_ACCESS_ERR: c_uint = 8;
/// `IBV_WC_REM_INV_REQ_ERR`.
pub const IBV_WC_REM_INV_REQ_ERR: c_uint = 9;
/// `IBV_WC_REM_ACCESS_ERR`.
pub const IBV_WC_REM_ACCESS_ERR: c_uint = 10;
/// `IBV_WC_REM_OP_ERR`.
pub const IBV_WC_REM_OP_ERR: c_uint = 11;
/// `IBV_WC_RETRY_EXC_ERR`.
pub const IBV_WC_RETRY_EXC_ERR: c_uint = 12;
/// `IBV_WC_RNR_RETRY_EXC_ERR`.
pub const IBV_WC_RNR_RETRY_EXC_ERR: c_uint = 13;
/// `IBV_WC_REM_ABORT_ERR`.
pub const IBV_WC_REM_ABORT_ERR: c_uint = 16;
/// `IBV_WC_FATAL_ERR`.
pub const IBV_WC_FATAL_ERR: c_uint = 19;
/// `IBV_WC_RESP_TIMEOUT_ERR`.
pub const IBV_WC_RESP_TIMEOUT_ERR: c_uint = 20;
/// `IBV_WC_GENERAL_ERR`.
pub const IBV_WC_GENERAL_ERR: c_uint = 21;
/// `IBV_WC_RECV`: set in the opcode of every receive completion.
pub const IBV_WC_RECV: c_uint = 1 << 7;
