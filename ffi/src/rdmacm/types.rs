//! The stable part of the librdmacm ABI that oxygin uses, as `#[repr(C)]` types.
//!
//! Field order and values are those of `rdma/rdma_cma.h`; `tests/rdmacm_layout.rs` compares sizes, offsets and values
//! with what a C compiler makes of that header. C enums are plain integers here.

use crate::verbs::types::{ibv_ah_attr, ibv_comp_channel, ibv_context, ibv_cq, ibv_gid, ibv_pd, ibv_qp};
use std::ffi::{c_int, c_uint, c_void};

/// Where events arrive.
#[repr(C)]
pub struct rdma_event_channel {
    /// Readable when an event waits.
    pub fd: c_int,
}

/// InfiniBand's part of an address.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct rdma_ib_addr {
    /// Own GID.
    pub sgid: ibv_gid,
    /// The peer's GID.
    pub dgid: ibv_gid,
    /// Partition key, network byte order.
    pub pkey: u16,
}

/// Both ends of a connection.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rdma_addr {
    /// Own address.
    pub src_addr: libc::sockaddr_storage,
    /// The peer's address.
    pub dst_addr: libc::sockaddr_storage,
    /// InfiniBand's part.
    pub addr: rdma_ib_addr,
}

/// The way to the peer.
#[repr(C)]
pub struct rdma_route {
    /// Both ends.
    pub addr: rdma_addr,
    /// Path records; InfiniBand only.
    pub path_rec: *mut c_void,
    /// How many.
    pub num_paths: c_int,
}

/// One end of a connection, or a listener.
#[repr(C)]
pub struct rdma_cm_id {
    /// The device it is bound to, opened by librdmacm itself; NULL while it is not.
    pub verbs: *mut ibv_context,
    /// Where its events arrive.
    pub channel: *mut rdma_event_channel,
    /// The creator's pointer.
    pub context: *mut c_void,
    /// Queue pair that librdmacm made; NULL where the creator brings its own.
    pub qp: *mut ibv_qp,
    /// The way to the peer.
    pub route: rdma_route,
    /// `RDMA_PS_*`.
    pub ps: c_uint,
    /// Port of the device, from 1.
    pub port_num: u8,
    /// The last event of a synchronous identifier.
    pub event: *mut rdma_cm_event,
    /// librdmacm's own.
    pub send_cq_channel: *mut ibv_comp_channel,
    /// librdmacm's own.
    pub send_cq: *mut ibv_cq,
    /// librdmacm's own.
    pub recv_cq_channel: *mut ibv_comp_channel,
    /// librdmacm's own.
    pub recv_cq: *mut ibv_cq,
    /// librdmacm's own.
    pub srq: *mut c_void,
    /// librdmacm's own.
    pub pd: *mut ibv_pd,
    /// `IBV_QPT_*`.
    pub qp_type: c_uint,
}

/// What both ends tell each other at connect and accept.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct rdma_conn_param {
    /// Bytes for the peer.
    pub private_data: *const c_void,
    /// How many.
    pub private_data_len: u8,
    /// Reads arriving at most (iWARP: IRD).
    pub responder_resources: u8,
    /// Reads under way at most (iWARP: ORD).
    pub initiator_depth: u8,
    /// Unused by iWARP.
    pub flow_control: u8,
    /// Unused by iWARP.
    pub retry_count: u8,
    /// Unused by iWARP.
    pub rnr_retry_count: u8,
    /// Whether the queue pair has a shared receive queue.
    pub srq: u8,
    /// The queue pair, where the identifier has none of its own.
    pub qp_num: u32,
}

/// The same for datagrams.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct rdma_ud_param {
    /// Bytes from the peer.
    pub private_data: *const c_void,
    /// How many.
    pub private_data_len: u8,
    /// The way to it.
    pub ah_attr: ibv_ah_attr,
    /// Its queue pair.
    pub qp_num: u32,
    /// Its key.
    pub qkey: u32,
}

/// What an event carries.
#[repr(C)]
#[derive(Clone, Copy)]
pub union rdma_cm_event_param {
    /// Of a connection.
    pub conn: rdma_conn_param,
    /// Of a datagram.
    pub ud: rdma_ud_param,
    /// Of a user's own event.
    pub arg: u64,
}

/// Something happened to an identifier.
#[repr(C)]
pub struct rdma_cm_event {
    /// The identifier; a new one for a connect request.
    pub id: *mut rdma_cm_id,
    /// The listener that a connect request came to.
    pub listen_id: *mut rdma_cm_id,
    /// `RDMA_CM_EVENT_*`.
    pub event: c_uint,
    /// 0, a negative errno, or a transport's own reason.
    pub status: c_int,
    /// What it carries.
    pub param: rdma_cm_event_param,
}

/// `RDMA_PS_TCP`: connections.
pub const RDMA_PS_TCP: c_uint = 0x0106;
/// `RDMA_OPTION_ID`: options of identifiers.
pub const RDMA_OPTION_ID: c_int = 0;
/// `RDMA_OPTION_ID_TOS`: type of service, one byte.
pub const RDMA_OPTION_ID_TOS: c_int = 0;

/// `RDMA_CM_EVENT_ADDR_RESOLVED`.
pub const RDMA_CM_EVENT_ADDR_RESOLVED: c_uint = 0;
/// `RDMA_CM_EVENT_ADDR_ERROR`.
pub const RDMA_CM_EVENT_ADDR_ERROR: c_uint = 1;
/// `RDMA_CM_EVENT_ROUTE_RESOLVED`.
pub const RDMA_CM_EVENT_ROUTE_RESOLVED: c_uint = 2;
/// `RDMA_CM_EVENT_ROUTE_ERROR`.
pub const RDMA_CM_EVENT_ROUTE_ERROR: c_uint = 3;
/// `RDMA_CM_EVENT_CONNECT_REQUEST`.
pub const RDMA_CM_EVENT_CONNECT_REQUEST: c_uint = 4;
/// `RDMA_CM_EVENT_CONNECT_RESPONSE`.
pub const RDMA_CM_EVENT_CONNECT_RESPONSE: c_uint = 5;
/// `RDMA_CM_EVENT_CONNECT_ERROR`.
pub const RDMA_CM_EVENT_CONNECT_ERROR: c_uint = 6;
/// `RDMA_CM_EVENT_UNREACHABLE`.
pub const RDMA_CM_EVENT_UNREACHABLE: c_uint = 7;
/// `RDMA_CM_EVENT_REJECTED`.
pub const RDMA_CM_EVENT_REJECTED: c_uint = 8;
/// `RDMA_CM_EVENT_ESTABLISHED`.
pub const RDMA_CM_EVENT_ESTABLISHED: c_uint = 9;
/// `RDMA_CM_EVENT_DISCONNECTED`.
pub const RDMA_CM_EVENT_DISCONNECTED: c_uint = 10;
/// `RDMA_CM_EVENT_DEVICE_REMOVAL`.
pub const RDMA_CM_EVENT_DEVICE_REMOVAL: c_uint = 11;
/// `RDMA_CM_EVENT_ADDR_CHANGE`.
pub const RDMA_CM_EVENT_ADDR_CHANGE: c_uint = 14;
/// `RDMA_CM_EVENT_TIMEWAIT_EXIT`.
pub const RDMA_CM_EVENT_TIMEWAIT_EXIT: c_uint = 15;
