//! The hand-written verbs types against what a C compiler makes of `infiniband/verbs.h` (package libibverbs-dev).

mod c_layout;

use c_layout::{compare, offsets, sizes, values};
use oxygin_ffi::verbs::types::*;
use std::mem::{offset_of, size_of};

fn expected() -> Vec<(String, u64)> {
    let mut out = Vec::new();
    sizes!(
        out,
        ibv_device,
        ibv_context_ops,
        ibv_context,
        ibv_async_event,
        ibv_pd,
        ibv_mr,
        ibv_comp_channel,
        ibv_cq,
        ibv_qp,
        ibv_gid_entry,
        ibv_device_attr,
        ibv_qp_cap,
        ibv_qp_init_attr,
        ibv_global_route,
        ibv_ah_attr,
        ibv_qp_attr,
        ibv_sge,
        ibv_send_wr,
        ibv_recv_wr,
        ibv_wc
    );
    out.push(("sizeof(union ibv_gid)".into(), size_of::<ibv_gid>() as u64));
    out.push(("_Alignof(union ibv_gid)".into(), std::mem::align_of::<ibv_gid>() as u64));
    offsets! { out,
        ibv_device { node_type, transport_type, name, dev_name, dev_path, ibdev_path }
        ibv_context_ops { poll_cq, req_notify_cq, post_send, post_recv }
        ibv_context { device, ops, cmd_fd, async_fd, num_comp_vectors, abi_compat }
        ibv_async_event { element, event_type }
        ibv_pd { context, handle }
        ibv_mr { context, pd, addr, length, handle, lkey, rkey }
        ibv_comp_channel { context, fd, refcnt }
        ibv_cq { context, channel, cq_context, handle, cqe, mutex, cond }
        ibv_qp { context, qp_context, pd, send_cq, recv_cq, srq, handle, qp_num, state, qp_type }
        ibv_gid_entry { gid, gid_index, port_num, gid_type, ndev_ifindex }
        ibv_device_attr {
            node_guid, sys_image_guid, max_mr_size, max_qp, max_qp_wr, device_cap_flags, max_cqe, max_qp_rd_atom,
            max_qp_init_rd_atom, atomic_cap, max_pkeys, phys_port_cnt
        }
        ibv_port_attr {
            state, max_mtu, active_mtu, gid_tbl_len, max_msg_sz, pkey_tbl_len, lid, active_width, active_speed,
            phys_state, link_layer, flags, port_cap_flags2
        }
        ibv_qp_cap { max_send_wr, max_recv_wr, max_send_sge, max_recv_sge, max_inline_data }
        ibv_qp_init_attr { qp_context, send_cq, recv_cq, srq, cap, qp_type, sq_sig_all }
        ibv_global_route { dgid, flow_label, sgid_index, hop_limit, traffic_class }
        ibv_ah_attr { grh, dlid, sl, src_path_bits, static_rate, is_global, port_num }
        ibv_qp_attr {
            qp_state, path_mtu, rq_psn, sq_psn, dest_qp_num, qp_access_flags, cap, ah_attr, pkey_index, max_rd_atomic,
            max_dest_rd_atomic, min_rnr_timer, port_num, timeout, retry_cnt, rnr_retry, rate_limit
        }
        ibv_sge { addr, length, lkey }
        ibv_send_wr { wr_id, next, sg_list, num_sge, opcode, send_flags, imm_data, wr, qp_type }
        ibv_recv_wr { wr_id, next, sg_list, num_sge }
        ibv_wc { wr_id, status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp, wc_flags, pkey_index, slid, sl }
    }
    let wr = offset_of!(ibv_send_wr, wr) as u64;
    out.push(("offsetof(struct ibv_send_wr, wr.rdma.remote_addr)".into(), wr));
    out.push(("offsetof(struct ibv_send_wr, wr.rdma.rkey)".into(), wr + offset_of!(ibv_wr_rdma, rkey) as u64));
    out.push((
        "offsetof(struct ibv_send_wr, wr.atomic.compare_add)".into(),
        wr + offset_of!(ibv_wr_atomic, compare_add) as u64,
    ));
    out.push(("offsetof(struct ibv_send_wr, wr.atomic.rkey)".into(), wr + offset_of!(ibv_wr_atomic, rkey) as u64));
    values!(
        out,
        IBV_NODE_RNIC,
        IBV_TRANSPORT_IB,
        IBV_TRANSPORT_IWARP,
        IBV_GID_TYPE_IB,
        IBV_GID_TYPE_ROCE_V1,
        IBV_GID_TYPE_ROCE_V2,
        IBV_ATOMIC_NONE,
        IBV_ATOMIC_HCA,
        IBV_ATOMIC_GLOB,
        IBV_EVENT_CQ_ERR,
        IBV_EVENT_QP_FATAL,
        IBV_EVENT_DEVICE_FATAL,
        IBV_PORT_ACTIVE,
        IBV_LINK_LAYER_INFINIBAND,
        IBV_LINK_LAYER_ETHERNET,
        IBV_QPF_GRH_REQUIRED,
        IBV_MTU_256,
        IBV_MTU_4096,
        IBV_QPT_RC,
        IBV_QPS_RESET,
        IBV_QPS_INIT,
        IBV_QPS_RTR,
        IBV_QPS_RTS,
        IBV_QPS_ERR,
        IBV_QP_STATE,
        IBV_QP_ACCESS_FLAGS,
        IBV_QP_PKEY_INDEX,
        IBV_QP_PORT,
        IBV_QP_AV,
        IBV_QP_PATH_MTU,
        IBV_QP_TIMEOUT,
        IBV_QP_RETRY_CNT,
        IBV_QP_RNR_RETRY,
        IBV_QP_RQ_PSN,
        IBV_QP_MAX_QP_RD_ATOMIC,
        IBV_QP_MIN_RNR_TIMER,
        IBV_QP_SQ_PSN,
        IBV_QP_MAX_DEST_RD_ATOMIC,
        IBV_QP_DEST_QPN,
        IBV_ACCESS_LOCAL_WRITE,
        IBV_ACCESS_REMOTE_WRITE,
        IBV_ACCESS_REMOTE_READ,
        IBV_ACCESS_REMOTE_ATOMIC,
        IBV_ACCESS_RELAXED_ORDERING,
        IBV_WR_RDMA_WRITE,
        IBV_WR_SEND,
        IBV_WR_RDMA_READ,
        IBV_WR_ATOMIC_FETCH_AND_ADD,
        IBV_SEND_SIGNALED,
        IBV_SEND_SOLICITED,
        IBV_SEND_INLINE,
        IBV_WC_SUCCESS,
        IBV_WC_LOC_LEN_ERR,
        IBV_WC_LOC_QP_OP_ERR,
        IBV_WC_LOC_PROT_ERR,
        IBV_WC_WR_FLUSH_ERR,
        IBV_WC_LOC_ACCESS_ERR,
        IBV_WC_REM_INV_REQ_ERR,
        IBV_WC_REM_ACCESS_ERR,
        IBV_WC_REM_OP_ERR,
        IBV_WC_RETRY_EXC_ERR,
        IBV_WC_RNR_RETRY_EXC_ERR,
        IBV_WC_REM_ABORT_ERR,
        IBV_WC_FATAL_ERR,
        IBV_WC_RESP_TIMEOUT_ERR,
        IBV_WC_GENERAL_ERR,
        IBV_WC_RECV,
    );
    out
}

#[test]
fn types_are_laid_out_as_the_c_header_says() {
    compare("verbs_layout", "infiniband/verbs.h", "libibverbs-dev", &expected());
}
